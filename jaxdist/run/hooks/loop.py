"""The work of a run between steps: log, exchange, evaluate, save, trace, and stop on request.

Each task is a `LoopHook` that is independent of the others; `RunHooks` calls them in order. A hook
passes its results to later hooks in the `Moment`; for example, a checkpoint is also saved where an
evaluation was the best so far.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.metrics.progress import Progress
from jaxdist.metrics.writer import Records
from jaxdist.optim.safety import check_skips
from jaxdist.run.suspect import SuspectStateError
from jaxdist.run.termination import Termination
from jaxdist.train.state import Outer, TrainState


@dataclass
class Cadence:
    """The steps after which a task is due: multiples of `every`, if it is not None, and `last`."""

    every: int | None
    last: int

    def due(self, step: int) -> bool:
        """Return whether the task is due after `step`."""
        return step == self.last or (self.every is not None and step % self.every == 0)

    def saved(self, step: int, seconds: float) -> None:
        """Receive the time, in seconds, that a due save took; called on every process."""


@dataclass
class Moment:
    """The state after a step, while no step is in flight.

    Attributes:
      state: the state with which training continues; a hook may replace it.
      heldout: means of the evaluation at this step, if there was one.
      best: whether the held-out loss is the best so far.
      saved: whether a hook has begun a checkpoint or a snapshot of this state.
      lasting: whether a hook has begun a checkpoint of this state.
      stop: whether the run ends after this step.
    """

    step: int
    state: TrainState
    heldout: dict[str, float] | None = None
    best: bool = False
    saved: bool = False
    lasting: bool = False
    stop: bool = False


class LoopHook:
    """A hook that does nothing; subclasses override the methods that they need."""

    def waiting(self, step: int) -> None:
        """Note that the loop begins to wait for `step`, whose metrics come next."""

    def metrics(self, step: int, values: jax.Array, step_seconds: float) -> None:
        """Receive the metrics of `step`, ready to be read; called for every step, in order."""

    def due(self, step: int) -> bool:
        """Return whether the loop must wait for `step`; called once a step, in every process."""
        return False

    @property
    def told_to_stop(self) -> bool:
        """Whether this process was asked to end the run; may be read at any time."""
        return False

    def at(self, moment: Moment) -> None:
        """Act between two steps; called on every hook whenever any hook is due."""


@dataclass
class Guard(LoopHook):
    """A check that ends a run whose loss or gradient is not finite, before anything is saved.

    Attributes:
      names: names of the values in the step's metrics vector.
      max_skipped: number of skipped steps in a row that ends the run, or None where no step is
        skipped.
      max_restores: number of times that a run may restart from its newest checkpoint because of
        such a value.
    """

    names: tuple[str, ...]
    store: CheckpointStore
    max_skipped: int | None = None
    max_restores: int = 0
    _last: tuple[int, jax.Array] | None = None

    def metrics(self, step: int, values: jax.Array, step_seconds: float) -> None:
        self._last = step, values

    def at(self, moment: Moment) -> None:
        assert self._last is not None
        assert self._last[0] == moment.step
        self.checked(*self._last)

    def checked(self, step: int, values: jax.Array) -> dict[str, float]:
        """Return the values by name.

        Raises:
          SuspectStateError: a value is not finite.
          RunError: too many steps in a row were skipped.
        """
        found = dict(zip(self.names, np.asarray(values).tolist(), strict=True))
        if self.max_skipped is not None:
            row = int(found["skipped_in_a_row"])
            check_skips(row, int(found["skipped_steps"]), max_consecutive=self.max_skipped)
            if row:  # the state is unchanged by this step
                return found
        # A gradient that is not finite has already spoilt the state; the loss would show it a step
        # later.
        if not (math.isfinite(found["loss"]) and math.isfinite(found["grad_norm"])):
            # A checkpoint may still be on its way to disk; the message names complete checkpoints.
            self.store.wait()
            saved = self.store.steps()
            kept = f"the last good checkpoint is step {saved[-1]}" if saved else "nothing was saved"
            raise SuspectStateError(
                f"loss is {found['loss']} at step {step} (gradient norm {found['grad_norm']:.3g}, "
                f"learning rate {found['learning_rate']:.3g})",
                f"{kept}. Lower optim.learning_rate, set optim.clip_norm, lengthen "
                "optim.schedule.warmup_steps, or set optim.skip_nonfinite",
                max_restores=self.max_restores,
            )
        return found


@dataclass
class Log(LoopHook):
    """A hook that writes metrics at an interval, without waiting for a computation."""

    cadence: Cadence
    guard: Guard
    progress: Progress
    writer: Records

    def metrics(self, step: int, values: jax.Array, step_seconds: float) -> None:
        if not (self.cadence.due(step) or step == 1):
            return
        found = self.guard.checked(step, values)
        self.progress.update(step, loss=found["loss"], step_seconds=step_seconds)
        more = dict(self.progress.measured(step_seconds))
        self.writer.write(step, {**found, "step_seconds": step_seconds, **more})


@dataclass
class StopHook(LoopHook):
    """A check that ends a run that was asked to stop."""

    termination: Termination
    stopped: bool = False

    def due(self, step: int) -> bool:
        self.stopped = self.termination.requested(step)
        return self.stopped

    @property
    def told_to_stop(self) -> bool:
        return self.termination.signal is not None

    def at(self, moment: Moment) -> None:
        moment.stop = moment.stop or self.stopped


@dataclass
class Between(LoopHook):
    """An exchange of parameters between steps, for strategies that have one.

    Attributes:
      exchange: function from a state to the state with which training continues.
    """

    outer: Outer
    exchange: Callable[[TrainState], TrainState]

    def due(self, step: int) -> bool:
        return self.outer.due(step)

    def at(self, moment: Moment) -> None:
        if self.outer.due(moment.step):
            moment.state = self.exchange(moment.state)


@dataclass
class Evaluate(LoopHook):
    """A hook that measures held-out means and records the best loss.

    Attributes:
      run: function from a state to the means.
      best: the best held-out loss so far, or None.
      heldout: the means of the last evaluation.
    """

    cadence: Cadence
    run: Callable[[TrainState], dict[str, float]]
    progress: Progress
    writer: Records
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
        self.writer.write(moment.step, self.heldout, split="heldout")


@dataclass
class Save(LoopHook):
    """A hook that saves a checkpoint when due, when the run stops, and at the best loss so far.

    Attributes:
      save: function that saves a checkpoint, from the state, the best held-out loss so far, and the
        held-out loss of this step.
      evaluate: hook that records the best loss, or None without a held-out split.
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
            begun = time.perf_counter()
            self.save(moment.state, best, metric)
            moment.saved = moment.lasting = True
            if not moment.stop:
                self.cadence.saved(moment.step, time.perf_counter() - begun)


@dataclass
class Snapshot(LoopHook):
    """A hook that copies the state when due, unless an earlier hook saved it more durably.

    Attributes:
      lasts: whether the copies are on a disk. Only a checkpoint then makes a copy unnecessary.
    """

    cadence: Cadence
    take: Callable[[TrainState], None]
    lasts: bool = False

    def due(self, step: int) -> bool:
        return self.cadence.due(step)

    def at(self, moment: Moment) -> None:
        if moment.stop or not self.cadence.due(moment.step):
            return
        begun, taken = time.perf_counter(), not (moment.lasting if self.lasts else moment.saved)
        if taken:
            self.take(moment.state)
            moment.saved = True
        self.cadence.saved(moment.step, time.perf_counter() - begun if taken else 0.0)


@dataclass
class RunHooks:
    """All hooks of a run, which are called in order."""

    hooks: Sequence[LoopHook]
    stopped: bool = False

    def waiting(self, step: int) -> None:
        """Report to each hook that the loop begins to wait for `step`."""
        for hook in self.hooks:
            hook.waiting(step)

    def metrics(self, step: int, values: jax.Array, step_seconds: float) -> None:
        """Pass the metrics of a step to each hook."""
        for hook in self.hooks:
            hook.metrics(step, values, step_seconds)

    def due(self, step: int) -> bool:
        """Return whether any hook needs the loop to wait for `step`."""
        # Every hook is asked, even after a True, since `due` may communicate or measure.
        asked = [hook.due(step) for hook in self.hooks]
        return any(asked)

    @property
    def told_to_stop(self) -> bool:
        """Whether this process was asked to end the run, perhaps in the middle of a step."""
        return any(hook.told_to_stop for hook in self.hooks)

    def boundary(self, step: int, state: TrainState) -> tuple[TrainState, bool]:
        """Call each hook between two steps; return the next state, and whether to stop."""
        moment = Moment(step, state)
        for hook in self.hooks:
            hook.at(moment)
        self.stopped = moment.stop
        return moment.state, moment.stop


def _improves(loss: float, best: float | None) -> bool:
    """Return whether a held-out loss is the best so far; a loss that is not finite never is."""
    if best is None or not math.isfinite(best):
        return math.isfinite(loss)
    return math.isfinite(loss) and loss < best
