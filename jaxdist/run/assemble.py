"""The functions that make the hooks of a run's loop from the run's config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxdist.checkpoint.snapshots import Snapshots
from jaxdist.experiment import Experiment
from jaxdist.metrics.account import Account, Activity
from jaxdist.metrics.progress import Progress
from jaxdist.metrics.writer import Records
from jaxdist.run.checkpoints import save
from jaxdist.run.files import RunFiles
from jaxdist.run.hooks.loop import (
    Between,
    Cadence,
    Evaluate,
    Guard,
    Log,
    LoopHook,
    Save,
    Snapshot,
    StopHook,
)
from jaxdist.run.replicas import CompareReplicas
from jaxdist.run.termination import Termination
from jaxdist.run.tiers import Tier, Tiers
from jaxdist.run.watch.saves import Chooser, Chosen
from jaxdist.train.evaluate import evaluate
from jaxdist.train.replicas import replicas_of
from jaxdist.train.state import TrainState
from jaxdist.types import Json


@dataclass(frozen=True)
class HookParts:
    """The objects that the hooks of a run share.

    Attributes:
      kept: the metadata that is saved with each state.
    """

    experiment: Experiment
    files: RunFiles
    tiers: Tiers
    account: Account
    termination: Termination
    writer: Records
    progress: Progress
    kept: Mapping[str, Json]

    def every(self, steps: int | None) -> Cadence:
        """Return the cadence of a task that is due every `steps` steps and after the last step.

        If `steps` is None, the task is due only after the last step.
        """
        return Cadence(steps, self.experiment.total_steps)


def hooks_of(parts: HookParts, best: float | None) -> tuple[list[LoopHook], Evaluate | None]:
    """Return the hooks of a run's loop in order, and the hook that evaluates.

    The hook that evaluates is None if the run has no held-out split.

    Args:
      parts: the objects that the hooks share.
      best: the best held-out loss of a resumed run so far, or None without such a loss.
    """
    experiment, tiers = parts.experiment, parts.tiers
    config, program, writer = experiment.config, experiment.program, parts.writer
    checked = config.train.check_replicas
    # A restart also repairs a loss that is infinite because of a flipped bit. A run that diverges
    # without a fault reaches the same loss again after the restart, and then ends.
    restores = 0 if checked is None else min(checked.restores, 1)
    guard = Guard(program.metrics, tiers.store, program.optimizer.max_skipped, restores)
    log = Log(parts.every(config.train.log_every), guard, parts.progress, writer)
    # The order matters: checks and exchanges come before the hooks that evaluate or save the state.
    hooks: list[LoopHook] = [guard, log, StopHook(parts.termination)]
    if program.outer is not None:
        hooks.append(Between(program.outer, program.between))
    if checked is not None:
        compared = checked, parts.every(checked.every), replicas_of(program), tiers.store
        hooks.append(CompareReplicas(*compared, writer, parts.account))
    measured = _evaluate(parts, best)
    hooks.extend([measured] if measured is not None else [])
    # If an agent records failures and the machine's memory holds snapshots, a run continues from a
    # snapshot after a failure. Its checkpoints then protect only against the loss of the machine,
    # which the journal does not record.
    seen = parts.files.agent.sees_failures and config.checkpoint.memory_every is None
    cadence = _cadence(config.checkpoint.every, Activity.CHECKPOINT_BLOCKED, parts, seen=seen)
    hooks.append(Save(cadence, _saving(parts), measured))
    hooks.extend(parts.files.agent.hooks())
    hooks.extend(_snapshot(parts, tier, measured) for tier in tiers.snapshots)
    return hooks, measured


def _evaluate(parts: HookParts, best: float | None) -> Evaluate | None:
    config, program = parts.experiment.config.eval, parts.experiment.program
    heldout = parts.experiment.heldout
    if heldout is None:
        return None

    def held_out(state: TrainState) -> dict[str, float]:
        with (
            parts.account.within(Activity.EVALUATION),
            heldout.evaluation_batches(config.batches) as batches,
        ):
            return evaluate(program, program.evaluated(state), state.buffers, batches)

    return Evaluate(parts.every(config.every), held_out, parts.progress, parts.writer, best)


def _saving(parts: HookParts) -> Callable[[TrainState, float | None, float | None], None]:
    program, config = parts.experiment.program, parts.experiment.config.checkpoint
    rows = parts.experiment.rows

    def saved(state: TrainState, best: float | None, metric: float | None) -> None:
        with parts.account.within(Activity.CHECKPOINT_BLOCKED):
            if rows is not None and rows.save is not None:
                # The tables are saved before the state, so that a complete checkpoint always has
                # its tables.
                rows.save(int(state.step))
            given = {"metric": metric, "parts": config.parts}
            metadata = {"best": best, **parts.kept}
            save(parts.tiers.store, program, state, metadata=metadata, **given)

    return saved


def _snapshot(parts: HookParts, tier: Tier, measured: Evaluate | None) -> Snapshot:
    cadence = _cadence(tier.every, Activity.SNAPSHOT, parts, seen=True)
    return Snapshot(cadence, _taking(parts, tier.snapshots, measured), lasts=tier.lasts)


def _taking(
    parts: HookParts, snapshots: Snapshots, measured: Evaluate | None
) -> Callable[[TrainState], None]:
    def take(state: TrainState) -> None:
        best = None if measured is None else measured.best
        with parts.account.within(Activity.SNAPSHOT):
            snapshots.take(int(state.step), state, {"best": best, **parts.kept})

    return take


def _cadence(every: int | str, kind: Activity, parts: HookParts, *, seen: bool) -> Cadence:
    """Return a cadence with a fixed interval, or a cadence that chooses its interval itself.

    Args:
      every: the number of steps between two saves, or "auto" if the run chooses the number.
      kind: the activity in the account of time to which the saves belong.
      seen: whether an agent records the failures against which these saves protect.
    """
    if isinstance(every, int):
        return parts.every(every)
    chooser = Chooser(
        kind,
        "a snapshot" if kind is Activity.SNAPSHOT else "a checkpoint",
        parts.account,
        parts.files.directory.path if seen else None,
        3600 * parts.files.config.checkpoint.mttf_hours,
        parts.progress.note,
        parts.writer,
        parts.progress.step,
    )
    return Chosen(chooser, parts.progress.step, parts.experiment.total_steps)
