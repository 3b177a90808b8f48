"""Steps that are traced by jax's profiler."""

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
    """Which steps of a run to trace, as `parse_profile` reads them.

    Attributes:
      first: a step's number; None counts from where the process begins.
      count: how many.
    """

    first: int | None
    count: int

    def after(self, start: int, total: int) -> tuple[int, int]:
        """The first and the last of them where a process begins after step `start`.

        Raises:
          ConfigError: they are not all among the steps that are left after the first.
        """
        first = start + _WARM_UP + 1 if self.first is None else self.first
        last = first + self.count - 1
        if first < start + 2:
            raise ConfigError(
                f"--profile begins at step {first}, but this process's first step is {start + 1}, "
                f"which is mostly compilation: begin at step {start + 2} or later"
            )
        if last > total:
            raise ConfigError(
                f"--profile ends at step {last}, but the run ends at step {total}: trace earlier "
                "or fewer steps"
            )
        return first, last


_WARM_UP = 2
"""Steps before those that are only counted: one compiles, one fills what runs ahead."""
_RANGE = re.compile(r"(?:(\d{1,9}):)?(\d{1,9})")


def parse_profile(text: str) -> ProfiledSteps:
    """Steps `first:last`, both traced, or a number of steps after a warm-up of two.

    Raises:
      ConfigError: neither of these, or none at all.

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
    """Traces some steps with jax's profiler, in one process of a run.

    Attributes:
      folder: where to; None where another process traces.
      say: told where the trace lies, or why there is none.
    """

    first: int
    last: int
    folder: Path | None
    say: Callable[[str], None]
    running: bool = False

    def due(self, step: int) -> bool:
        # No step may be in flight where a trace begins or ends.
        return step in (self.first - 1, self.last)

    def metrics(self, step: int, values: jax.Array, step_seconds: float) -> None:
        # Not at the boundary, where an evaluation may come first.
        if step == self.last:
            self.close()

    def at(self, moment: Moment) -> None:
        if moment.step == self.first - 1 and self.folder is not None and not moment.stop:
            jax.profiler.start_trace(self.folder, create_perfetto_trace=True)
            self.running = True

    def close(self) -> None:
        """End the trace, if one is running, and say where it lies."""
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
