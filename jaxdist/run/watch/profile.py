"""Traces of steps by jax's profiler."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxdist.errors import ConfigError
from jaxdist.run.hooks.loop import LoopHook, Moment


@dataclass(frozen=True)
class ProfiledSteps:
    """The steps of a run to trace, as `parse_profile` parses them.

    Attributes:
      first: number of the first step; None counts from the start of the process.
      count: number of steps.
    """

    first: int | None
    count: int

    def after(self, start: int, total: int) -> tuple[int, int]:
        """Return the first and last of these steps, if the process starts after step `start`.

        Raises:
          ConfigError: the process does not take all of these steps, or its first step is among
            them.
        """
        first = start + _WARM_UP + 1 if self.first is None else self.first
        last = first + self.count - 1
        if first < start + 2:
            raise ConfigError(
                f"--profile begins at step {first}, but this process's first step is {start + 1}, "
                f"most of which is compilation: begin at step {start + 2} or later"
            )
        if last > total:
            raise ConfigError(
                f"--profile ends at step {last}, but the run ends at step {total}: trace earlier "
                "or fewer steps"
            )
        return first, last


_WARM_UP = 2
"""Number of steps before the traced steps where only a count is given: the first step compiles, and
the second fills the pipeline of batches."""
_RANGE = re.compile(r"(?:(\d{1,9}):)?(\d{1,9})")


def parse_profile(text: str) -> ProfiledSteps:
    """Parse `first:last`, which includes both, or a number of steps after a warm-up of two steps.

    Raises:
      ConfigError: the text has neither form, or denotes no step.

    >>> parse_profile("10:13"), parse_profile("4")
    (ProfiledSteps(first=10, count=4), ProfiledSteps(first=None, count=4))
    """
    matched = _RANGE.fullmatch(text)
    if matched is None:
        raise ConfigError(
            f"--profile {text!r} cannot be read: give the first and the last step, such as 10:13, "
            "or a number of steps, such as 4"
        )
    first, last = matched[1], int(matched[2])
    found = ProfiledSteps(None if first is None else int(first), last - int(first or 1) + 1)
    if found.count < 1:
        raise ConfigError(f"--profile {text} traces no step: the last must not be before the first")
    return found


@dataclass
class Profile(LoopHook):
    """A hook that traces some steps with jax's profiler, in one process of a run.

    Attributes:
      folder: directory of the trace, or None if another process traces.
      say: called with the location of the trace, or the reason that no trace was written.
    """

    first: int
    last: int
    folder: Path | None
    say: Callable[[str], None]
    running: bool = False

    def due(self, step: int) -> bool:
        # No step may be in flight where a trace starts or ends.
        return step in (self.first - 1, self.last)

    def metrics(self, step: int, values: jax.Array, step_seconds: float) -> None:
        # In `at` the trace would end too late: an evaluation may run before this hook is called.
        if step == self.last:
            self.close()

    def at(self, moment: Moment) -> None:
        if moment.step == self.first - 1 and self.folder is not None and not moment.stop:
            jax.profiler.start_trace(self.folder, create_perfetto_trace=True)
            self.running = True

    def close(self) -> None:
        """End a running trace, and print its location."""
        if not self.running:
            return
        self.running = False
        try:
            jax.profiler.stop_trace()
        except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
            self.say(f"profile: no trace was written to {self.folder}: {error}")
            return
        self.say(
            f"profile: steps {self.first} to {self.last} in {self.folder}; open "
            "perfetto_trace.json.gz of it at https://ui.perfetto.dev, or all of it with "
            f"xprof --logdir {self.folder}"
        )
