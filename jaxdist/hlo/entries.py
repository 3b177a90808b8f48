"""What a timeline is made of: how long instructions take, and what of it the device waits for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, Protocol

from jaxdist.hlo.estimates import Effort
from jaxdist.hlo.records import Collective

Basis = Literal["compiler", "links", "copy", "assumed", "schedule"]
"""Where the seconds of an entry come from: the compiler's estimate, bytes and links, bytes and
memory bandwidth, FLOPs and bytes at an assumed rate, or what others do in the ticks of a schedule
that this device waits through."""

Resource = int | str


class Rates(Protocol):
    """The speeds of the device and its links."""

    def cycles(self, count: int) -> float:
        """Seconds of so many cycles."""
        ...

    def transfer(self, collective: Collective) -> tuple[float, frozenset[Resource]]:
        """Seconds of one execution, and the links that it occupies."""
        ...

    def copy(self, size_bytes: int, *, host: bool) -> float:
        """Seconds of a copy within the device's memories, or to or from the host's."""
        ...

    def work(self, effort: Effort) -> tuple[float, str]:
        """Seconds of what has no estimate, and the assumption behind them."""
        ...


@dataclasses.dataclass(frozen=True)
class Entry:
    """What one instruction contributes to the step, over all its executions."""

    name: str
    source: str
    """The jax operation (`op_name`), or empty."""
    basis: Basis
    axes: tuple[str, ...] | None
    """Mesh axes of a collective; () for all else, None for groups that are no product of axes."""
    what: str
    """The kind of collective, the assumption behind `seconds`, or the operation."""
    times: float
    seconds: float
    """How long it runs, alone or beside others."""
    waited_seconds: float
    """How long the device does nothing else because of it."""

    def scaled(self, times: float) -> Entry:
        """So many times as often."""
        return dataclasses.replace(
            self,
            times=self.times * times,
            seconds=self.seconds * times,
            waited_seconds=self.waited_seconds * times,
        )

    def plus(self, other: Entry) -> Entry:
        """Both together; the rest is of `self`."""
        return dataclasses.replace(
            self,
            times=self.times + other.times,
            seconds=self.seconds + other.seconds,
            waited_seconds=self.waited_seconds + other.waited_seconds,
        )


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A program, or a piece of it, from its beginning to its end."""

    seconds: float
    entries: Mapping[str, Entry]
    unknown_loops: tuple[str, ...] = ()
    """Loops whose length only running tells: one turn of each is counted."""
    has_branches: bool = False
    """Whether there are conditionals of which nothing says which branch is taken."""

    def scaled(self, times: float) -> Timeline:
        """So many times one after another."""
        entries = {name: entry.scaled(times) for name, entry in self.entries.items()}
        return dataclasses.replace(self, seconds=self.seconds * times, entries=entries)
