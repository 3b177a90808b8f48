"""A hook that traces steps with jax's profiler, and the choice of the steps to trace."""

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
      first: the number of the first step to trace, or None to trace soon after the start of the
        process.
      count: the number of steps to trace.
    """

    first: int | None
    count: int

    def after(self, start: int, total: int) -> tuple[int, int]:
        """Return the first and last step to trace in a process that continues after step `start`.

        Args:
          start: the number of steps before this process.
          total: the number of steps of the run.

        Raises:
          ConfigError: the process does not take all steps to trace, or the steps to trace include
            the first step of the process.
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
"""The number of steps before the traced steps, if only a count of steps to trace is given.

The first of these steps compiles, and the second fills the pipeline of batches.
"""
_RANGE = re.compile(r"(?:(\d{1,9}):)?(\d{1,9})")


def parse_profile(text: str) -> ProfiledSteps:
    """Parse the text `first:last`, or a count of steps to trace after a warm-up of two steps.

    With `first:last`, the steps `first` and `last` are traced too.

    Raises:
      ConfigError: the text has neither form, or names no step.

    >>> parse_profile("10:13"), parse_profile("4")
    (ProfiledSteps(first=10, count=4), ProfiledSteps(first=None, count=4))
    """
    matched = _RANGE.fullmatch(text)
    if matched is None:
        raise ConfigError(
            f"--profile {text!r} cannot be read: write the first and the last step, such as 10:13, "
            "or a number of steps, such as 4"
        )
    first, last = matched[1], int(matched[2])
    found = ProfiledSteps(None if first is None else int(first), last - int(first or 1) + 1)
    if found.count < 1:
        raise ConfigError(
            f"--profile {text} traces no step: the last step must not be before the first step"
        )
    return found


@dataclass
class Profile(LoopHook):
    """A hook that traces steps with jax's profiler, in one process of a run.

    Attributes:
      folder: the directory of the trace, or None if another process traces.
      say: the function that is called with the location of the trace, or with the reason why no
        trace was written.
    """

    first: int
    last: int
    folder: Path | None
    say: Callable[[str], None]
    running: bool = False

    def due(self, step: int) -> bool:
        # The loop must wait after these steps, since no step may be in flight when a trace starts
        # or ends.
        return step in (self.first - 1, self.last)

    def metrics(self, step: int, values: jax.Array, step_seconds: float) -> None:
        # A trace that ended in `at` would end too late, since an evaluation may run before `at` is
        # called on this hook.
        if step == self.last:
            self.close()

    def at(self, moment: Moment) -> None:
        if moment.step == self.first - 1 and self.folder is not None and not moment.stop:
            jax.profiler.start_trace(self.folder, create_perfetto_trace=True)
            self.running = True

    def close(self) -> None:
        """End a trace that has begun, and print its location."""
        if not self.running:
            return
        self.running = False
        try:
            jax.profiler.stop_trace()
        except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
            self.say(
                f"profile: no trace was written to {self.folder}: {error}; if you need the trace, "
                "resume the run with --profile"
            )
            return
        self.say(
            f"profile: steps {self.first} to {self.last} in {self.folder}; open its file "
            "perfetto_trace.json.gz at https://ui.perfetto.dev, or open the folder with xprof "
            f"--logdir {self.folder}"
        )
