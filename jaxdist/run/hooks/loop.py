"""The tasks of a run between steps: log, exchange, evaluate, save, trace, and stop on request.

Each task is a `LoopHook` that does not call other hooks; `RunHooks` calls all hooks in order. A
hook writes its results to the `Moment`, where later hooks read them. For example, `Save` also saves
a checkpoint if the evaluation before it had the best loss so far.
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
    """The steps after which a task is due: multiples of `every`, if it is set, and `last`."""

    every: int | None
    last: int

    def due(self, step: int) -> bool:
        """Return whether the task is due after `step`."""
        return step == self.last or (self.every is not None and step % self.every == 0)

    def saved(self, step: int, seconds: float) -> None:
        """Record that a due save took `seconds`. Every process calls this method."""


@dataclass
class Moment:
    """The state of a run after a step, while no step is in flight.

    Attributes:
      state: the state with which training continues; a hook may replace it.
      heldout: the means of the evaluation after this step, or None if there was no evaluation.
      best: whether the held-out loss is the best so far.
      saved: whether a hook has begun to save this state as a checkpoint or a snapshot.
      lasting: whether a hook has begun to save this state as a checkpoint.
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
        """Note that the loop begins to wait for `step`; a call of `metrics` comes next."""

    def metrics(self, step: int, values: jax.Array, step_seconds: float) -> None:
        """Receive the metrics of `step` once they are computed.

        The loop calls this method for every step, in order.
        """

    def due(self, step: int) -> bool:
        """Return whether the loop must wait for the end of `step`, so that the hook can act.

        Every process calls this method exactly once a step.
        """
        return False

    @property
    def told_to_stop(self) -> bool:
        """Whether this process was asked to end the run; any thread may read this value."""
        return False

    def at(self, moment: Moment) -> None:
        """Act on the state after a step; called on every hook if any hook is due."""


@dataclass
class Guard(LoopHook):
    """A check that ends a run whose loss or gradient is not finite, before anything is saved.

    Attributes:
      names: the names of the values in a step's metrics vector.
      max_skipped: the number of consecutive skipped steps at which the run ends, or None if the run
        skips no steps.
      max_restores: the number of times that a run may restart from its newest checkpoint because of
        a value that is not finite.
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
        """Return the values of a step by name, after a check that the run may continue.

        Raises:
          SuspectStateError: the loss or the norm of the gradient is not finite.
          RunError: too many steps in a row were skipped.
        """
        found = dict(zip(self.names, np.asarray(values).tolist(), strict=True))
        if self.max_skipped is not None:
            row = int(found["skipped_in_a_row"])
            check_skips(row, int(found["skipped_steps"]), max_consecutive=self.max_skipped)
            if row:  # This step was skipped, so its bad values have not changed the state.
                return found
        # A gradient that is not finite has already made the parameters wrong, although the loss
        # shows this only one step later.
        if not (math.isfinite(found["loss"]) and math.isfinite(found["grad_norm"])):
            # A save may still be in progress, and the message below must name only complete
            # checkpoints.
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
    """A hook that writes metrics at the first step and at a fixed interval.

    The hook reads values that are already computed, so that the loop does not wait.
    """

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
    """A hook that exchanges parameters between steps, for strategies with such an exchange.

    Attributes:
      exchange: the function from a state to the state with which training continues.
    """

    outer: Outer
    exchange: Callable[[TrainState], TrainState]

    def due(self, step: int) -> bool:
        return self.outer.due(step)

    def at(self, moment: Moment) -> None:
        if self.outer.due(moment.step):
            moment.state = self.exchange(moment.state)


@dataclass
class HeldOut:
    """The results of the evaluations of a run on its held-out split.

    Attributes:
      best: the best held-out loss so far, or None before the first evaluation.
      means: the means of the last evaluation by name, or {} before the first evaluation.
    """

    best: float | None = None
    means: dict[str, float] = field(default_factory=dict)


@dataclass
class RegularHook(LoopHook):
    """A hook whose task interrupts the loop each time the cadence is due."""

    cadence: Cadence

    def due(self, step: int) -> bool:
        return self.cadence.due(step)


@dataclass
class Evaluate(RegularHook):
    """A hook that measures held-out means and records the best loss in `heldout`.

    Attributes:
      run: the function from a state to the held-out means by name.
    """

    run: Callable[[TrainState], dict[str, float]]
    progress: Progress
    writer: Records
    heldout: HeldOut

    def at(self, moment: Moment) -> None:
        if not self.cadence.due(moment.step):
            return
        self.heldout.means = moment.heldout = means = self.run(moment.state)
        moment.best = _improves(means["loss"], self.heldout.best)
        if moment.best:
            self.heldout.best = means["loss"]
        self.progress.evaluation(moment.step, means)
        self.writer.write(moment.step, means, split="heldout")


@dataclass
class Save(RegularHook):
    """A hook that saves a checkpoint when due, when the run stops, and at the best loss so far.

    Attributes:
      save: the function that saves a checkpoint. The arguments of the function are the state, and
        the held-out loss after this step, or None if the loss was not computed.
    """

    save: Callable[[TrainState, float | None], None]

    def at(self, moment: Moment) -> None:
        if moment.stop or moment.best or self.cadence.due(moment.step):
            metric = None if moment.heldout is None else moment.heldout["loss"]
            begun = time.perf_counter()
            self.save(moment.state, metric)
            moment.saved = moment.lasting = True
            if not moment.stop:
                self.cadence.saved(moment.step, time.perf_counter() - begun)


@dataclass
class Snapshot(RegularHook):
    """A hook that takes a snapshot when due, unless an earlier hook has saved the state.

    Attributes:
      lasts: whether the snapshots are on a disk. If true, only a checkpoint after the same step
        makes a snapshot unnecessary. If false, another snapshot after the same step also makes a
        snapshot unnecessary.
    """

    take: Callable[[TrainState], None]
    lasts: bool = False

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
    """All loop hooks of a run; each method calls the hooks in order."""

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
        """Whether this process was asked to end the run, perhaps during a step."""
        return any(hook.told_to_stop for hook in self.hooks)

    def boundary(self, step: int, state: TrainState) -> tuple[TrainState, bool]:
        """Call `at` of each hook; return the state to continue with, and whether to stop."""
        moment = Moment(step, state)
        for hook in self.hooks:
            hook.at(moment)
        self.stopped = moment.stop
        return moment.state, moment.stop


def _improves(loss: float, best: float | None) -> bool:
    """Return whether a held-out loss is finite and lower than the best loss so far."""
    if best is None or not math.isfinite(best):
        return math.isfinite(loss)
    return math.isfinite(loss) and loss < best
