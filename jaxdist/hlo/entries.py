"""The records of a timeline: the seconds of instructions, and the waits that they cause."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, Protocol

from jaxdist.hlo.estimates import Effort
from jaxdist.hlo.records import Collective

Basis = Literal["compiler", "links", "copy", "assumed", "schedule"]
"""The source of an entry's seconds. "compiler" is the compiler's estimate. "links" is the time
of bytes on links, and "copy" is the time of bytes at the memory's bandwidth. "assumed" is the
time of FLOPs and bytes at an assumed rate. "schedule" is the wait for other devices in a
pipeline's ticks."""

Resource = int | str
"""The name of a link, a memory or the host's bus, which carries a single transfer at a time."""


class Rates(Protocol):
    """The protocol for the speeds of a device and its links."""

    def cycles(self, count: int) -> float:
        """Return the time of `count` cycles, in seconds."""
        ...

    def transfer(self, collective: Collective) -> tuple[float, frozenset[Resource]]:
        """Return the seconds of one execution of a collective, and the links that it occupies."""
        ...

    def copy(self, size_bytes: int, *, host: bool) -> float:
        """Return the time of a copy, in seconds.

        Args:
          size_bytes: the bytes to copy.
          host: whether the source or the target is in the host's memory instead of the device's
            memory.
        """
        ...

    def work(self, effort: Effort) -> tuple[float, str]:
        """Return the assumed seconds of an instruction's work, and the assumption as text."""
        ...


@dataclasses.dataclass(frozen=True)
class Entry:
    """The contribution of an instruction to the step, summed over all its executions."""

    name: str
    source: str
    """The instruction's jax operation (`op_name`), or an empty string if XLA states none."""
    basis: Basis
    axes: tuple[str, ...] | None
    """The mesh axes that the groups of a collective span, or None if the groups are not a product
    of axes. For other entries the tuple is empty."""
    what: str
    """The kind of collective, the assumption behind `seconds`, or the operation."""
    times: float
    seconds: float
    """The seconds for which the instruction runs, alone or concurrently with other instructions."""
    waited_seconds: float
    """The seconds for which the device can do nothing else because of the instruction."""

    def scaled(self, times: float) -> Entry:
        """Return the entry with its executions and seconds multiplied by `times`."""
        return dataclasses.replace(
            self,
            times=self.times * times,
            seconds=self.seconds * times,
            waited_seconds=self.waited_seconds * times,
        )

    def plus(self, other: Entry) -> Entry:
        """Return the sum of this entry and `other`, with the text fields of this entry."""
        return dataclasses.replace(
            self,
            times=self.times + other.times,
            seconds=self.seconds + other.seconds,
            waited_seconds=self.waited_seconds + other.waited_seconds,
        )


@dataclasses.dataclass(frozen=True)
class ProgramTimeline:
    """The simulated time of a program, or of a part of a program."""

    seconds: float
    entries: Mapping[str, Entry]
    unknown_loops: tuple[str, ...] = ()
    """The loops whose number of iterations is unknown before a run. Each of them counts as a single
    iteration.
    """
    has_branches: bool = False
    """Whether the program has a conditional whose branch is unknown."""

    def scaled(self, times: float) -> ProgramTimeline:
        """Return the timeline of `times` repetitions of this program."""
        entries = {name: entry.scaled(times) for name, entry in self.entries.items()}
        return dataclasses.replace(self, seconds=self.seconds * times, entries=entries)
