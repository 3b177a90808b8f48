"""What a run does between steps: log, evaluate, save, and stop when it is told to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.errors import RunError
from jaxdist.metrics.progress import Progress
from jaxdist.metrics.writer import MetricsWriter
from jaxdist.optim.safety import check_skips
from jaxdist.train.state import TrainState
from jaxdist.train.termination import Termination


@dataclass(frozen=True)
class Cadence:
    """After which steps things happen; None is never, and the last step counts for all."""

    log: int
    evaluate: int | None
    save: int
    last: int

    def due(self, every: int | None, step: int) -> bool:
        """Whether something done `every` so many steps is due after `step`."""
        return step == self.last or (every is not None and step % every == 0)


@dataclass
class RunHooks:
    """The hooks of `jaxdist train`; only process 0 has a writer that writes.

    Attributes:
      names: names of the values in the step's metrics vector.
      evaluate: state to held-out means; None without a held-out split.
      best: the best held-out loss so far, if there was one.
      max_skipped: skipped steps in a row that end the run; None where no step is ever skipped.
      shapes: of what is saved: see `jaxdist.train.step.Program.own_shapes`.
      saved: from the state to what is saved of it.
    """

    names: tuple[str, ...]
    cadence: Cadence
    progress: Progress
    writer: MetricsWriter | None
    store: CheckpointStore
    evaluate: Callable[[TrainState], dict[str, float]] | None
    termination: Termination
    best: float | None
    max_skipped: int | None = None
    shapes: TrainState | None = None
    saved: Callable[[TrainState], TrainState] = lambda state: state
    heldout: dict[str, float] = field(default_factory=dict)
    _last_logged: tuple[int, jax.Array] | None = None
    _stop: bool = False

    def metrics(self, step: int, values: jax.Array, step_seconds: float) -> None:
        """Log every so many steps; the values are ready, so reading them waits for nothing."""
        self._last_logged = (step, values)
        if not (self.cadence.due(self.cadence.log, step) or step == 1):
            return
        found = self._finite(step, values)
        self.progress.update(step, loss=found["loss"], step_seconds=step_seconds)
        if self.writer is not None:
            self.writer.write(step, {**found, "step_seconds": step_seconds})

    def _finite(self, step: int, values: jax.Array) -> dict[str, float]:
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

    @property
    def stopped(self) -> bool:
        """Whether the run was told to stop, and did."""
        return self._stop

    def due(self, step: int) -> bool:
        """Whether to wait for this step: something is due, or the run was told to stop."""
        self._stop = self.termination.requested(step)
        evaluates = self.evaluate is not None and self.cadence.due(self.cadence.evaluate, step)
        return self._stop or evaluates or self.cadence.due(self.cadence.save, step)

    def boundary(self, step: int, state: TrainState) -> bool:
        """Evaluate, then save (also what is best so far, with the loss of its own step)."""
        assert self._last_logged is not None
        assert self._last_logged[0] == step
        self._finite(*self._last_logged)
        metric, improved = None, False
        if self.evaluate is not None and self.cadence.due(self.cadence.evaluate, step):
            self.heldout = self.evaluate(state)
            metric = self.heldout["loss"]
            improved = _improves(metric, self.best)
            self.best = metric if improved else self.best
            self.progress.evaluation(step, self.heldout)
            if self.writer is not None:
                self.writer.write(step, self.heldout, split="heldout")
        if self._stop or improved or self.cadence.due(self.cadence.save, step):
            metadata, shapes = {"best": self.best}, self.shapes
            saved = self.saved(state)
            self.store.save(step, saved, metadata=metadata, metric=metric, shapes=shapes)
        return self._stop


def _improves(loss: float, best: float | None) -> bool:
    """Whether a held-out loss is the best so far; one that is not finite neither is nor was."""
    if best is None or not math.isfinite(best):
        return math.isfinite(loss)
    return math.isfinite(loss) and loss < best
