"""What a run does between steps: log, exchange, evaluate, save, trace, stop when it is told to.

Each is a `Hook` that knows nothing of the others; `RunHooks` asks them in order. What one finds the
next may read in the `Moment`: a checkpoint is also saved where an evaluation was the best so far.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.errors import ConfigError, RunError
from jaxdist.metrics.progress import Progress
from jaxdist.metrics.writer import MetricsWriter
from jaxdist.optim.safety import check_skips
from jaxdist.train.state import Outer, TrainState
from jaxdist.train.termination import Termination


@dataclass(frozen=True)
class Cadence:
    """Every so many steps, and after the last; None is after the last alone."""

    every: int | None
    last: int

    def due(self, step: int) -> bool:
        """Whether it is the turn of `step`."""
        return step == self.last or (self.every is not None and step % self.every == 0)


@dataclass
class Moment:
    """After a step, while none is in flight.

    Attributes:
      state: that training goes on with; a hook may put another one there.
      heldout: means of the evaluation at this step, if there was one.
      best: whether its loss is the best so far.
      stop: whether the run ends here.
    """

    step: int
    state: TrainState
    heldout: dict[str, float] | None = None
    best: bool = False
    stop: bool = False


class Hook:
    """Does nothing at any step; a hook overrides what it needs."""

    def metrics(self, step: int, values: jax.Array, step_seconds: float) -> None:
        """The metrics of `step`, ready to be read; called for every step, in order."""

    def due(self, step: int) -> bool:
        """Whether the loop must wait for `step`; asked once for every step, in every process."""
        return False

    def at(self, moment: Moment) -> None:
        """At a boundary, whichever hook it was due for."""


@dataclass
class Guard(Hook):
    """Ends a run whose loss or gradient is not finite, before anything is saved.

    Attributes:
      names: names of the values in the step's metrics vector.
      max_skipped: skipped steps in a row that end the run; None where no step is ever skipped.
    """

    names: tuple[str, ...]
    store: CheckpointStore
    max_skipped: int | None = None
    _last: tuple[int, jax.Array] | None = None

    def metrics(self, step: int, values: jax.Array, step_seconds: float) -> None:
        self._last = step, values

    def at(self, moment: Moment) -> None:
        assert self._last is not None
        assert self._last[0] == moment.step
        self.checked(*self._last)

    def checked(self, step: int, values: jax.Array) -> dict[str, float]:
        """The values by name.

        Raises:
          RunError: they are not finite; too many steps in a row were skipped.
        """
        found = dict(zip(self.names, np.asarray(values).tolist(), strict=True))
        if self.max_skipped is not None:
            row = int(found["skipped_in_a_row"])
            check_skips(row, int(found["skipped_steps"]), max_consecutive=self.max_skipped)
            if row:  # the state is as it was before this step
                return found
        # A gradient that is not finite has already spoilt the state, one step before the loss.
        if not (math.isfinite(found["loss"]) and math.isfinite(found["grad_norm"])):
            self.store.wait()
            saved = self.store.steps()
            kept = f"the last good checkpoint is step {saved[-1]}" if saved else "nothing was saved"
            raise RunError(
                f"loss is {found['loss']} at step {step} (gradient norm {found['grad_norm']:.3g}, "
                f"learning rate {found['learning_rate']:.3g}); {kept}. Lower optim.learning_rate, "
                "set optim.clip_norm, lengthen optim.schedule.warmup_steps, or set "
                "optim.skip_nonfinite"
            )
        return found


@dataclass
class Log(Hook):
    """Writes metrics down every so many steps; reading them then waits for nothing."""

    cadence: Cadence
    guard: Guard
    progress: Progress
    writer: MetricsWriter | None

    def metrics(self, step: int, values: jax.Array, step_seconds: float) -> None:
        if not (self.cadence.due(step) or step == 1):
            return
        found = self.guard.checked(step, values)
        self.progress.update(step, loss=found["loss"], step_seconds=step_seconds)
        if self.writer is not None:
            more = dict(self.progress.measured(step_seconds))
            self.writer.write(step, {**found, "step_seconds": step_seconds, **more})


@dataclass
class Stop(Hook):
    """Ends a run that was told to stop."""

    termination: Termination
    stopped: bool = False

    def due(self, step: int) -> bool:
        self.stopped = self.termination.requested(step)
        return self.stopped

    def at(self, moment: Moment) -> None:
        moment.stop = moment.stop or self.stopped


@dataclass
class Between(Hook):
    """Exchanges parameters between steps, where a strategy does so.

    Attributes:
      exchange: from a state to the one that training goes on with.
    """

    outer: Outer
    exchange: Callable[[TrainState], TrainState]

    def due(self, step: int) -> bool:
        return self.outer.due(step)

    def at(self, moment: Moment) -> None:
        if self.outer.due(moment.step):
            moment.state = self.exchange(moment.state)


@dataclass
class Evaluate(Hook):
    """Measures held-out means.

    Attributes:
      run: from a state to them.
      best: the best held-out loss so far, if there was one.
      heldout: the last means.
    """

    cadence: Cadence
    run: Callable[[TrainState], dict[str, float]]
    progress: Progress
    writer: MetricsWriter | None
    best: float | None = None
    heldout: dict[str, float] = field(default_factory=dict)

    def due(self, step: int) -> bool:
        return self.cadence.due(step)

    def at(self, moment: Moment) -> None:
        if not self.cadence.due(moment.step):
            return
        self.heldout = moment.heldout = self.run(moment.state)
        moment.best = _improves(self.heldout["loss"], self.best)
        self.best = self.heldout["loss"] if moment.best else self.best
        self.progress.evaluation(moment.step, self.heldout)
        if self.writer is not None:
            self.writer.write(moment.step, self.heldout, split="heldout")


@dataclass
class Save(Hook):
    """Saves a checkpoint when its turn comes, where a run stops, and what is best so far.

    Attributes:
      save: (state, the best held-out loss so far, that of this step) to a checkpoint.
      evaluate: knows the best; None without a held-out split.
    """

    cadence: Cadence
    save: Callable[[TrainState, float | None, float | None], None]
    evaluate: Evaluate | None = None

    def due(self, step: int) -> bool:
        return self.cadence.due(step)

    def at(self, moment: Moment) -> None:
        if moment.stop or moment.best or self.cadence.due(moment.step):
            best = None if self.evaluate is None else self.evaluate.best
            metric = None if moment.heldout is None else moment.heldout["loss"]
            self.save(moment.state, best, metric)


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
class Profile(Hook):
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


@dataclass
class RunHooks:
    """Hooks in their order, as the loop asks them."""

    hooks: Sequence[Hook]
    stopped: bool = False

    def metrics(self, step: int, values: jax.Array, step_seconds: float) -> None:
        """Give the metrics of a step to each hook."""
        for hook in self.hooks:
            hook.metrics(step, values, step_seconds)

    def due(self, step: int) -> bool:
        """Whether to wait for this step."""
        asked = [hook.due(step) for hook in self.hooks]  # all of them, at every step
        return any(asked)

    def boundary(self, step: int, state: TrainState) -> tuple[TrainState, bool]:
        """The state to go on with, and whether to stop."""
        moment = Moment(step, state)
        for hook in self.hooks:
            hook.at(moment)
        self.stopped = moment.stop
        return moment.state, moment.stop


def _improves(loss: float, best: float | None) -> bool:
    """Whether a held-out loss is the best so far; one that is not finite neither is nor was."""
    if best is None or not math.isfinite(best):
        return math.isfinite(loss)
    return math.isfinite(loss) and loss < best
