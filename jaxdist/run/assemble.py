"""The functions that make the hooks of a run's loop from the run's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from jaxdist.checkpoint.snapshots import Snapshots
from jaxdist.data.loader import Loader
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
    HeldOut,
    Log,
    LoopHook,
    Save,
    Snapshot,
    StopHook,
)
from jaxdist.run.replicas import CompareReplicas
from jaxdist.run.termination import Termination
from jaxdist.run.tiers import Tiers
from jaxdist.run.watch.saves import Chosen
from jaxdist.tables.batch import RowsLoader
from jaxdist.train.evaluate import evaluate
from jaxdist.train.replicas import replicas_of
from jaxdist.train.state import TrainState
from jaxdist.types import Json


@dataclass(frozen=True)
class HookParts:
    """The objects that the hooks of a run share.

    Attributes:
      heldout: the results of the run's evaluations.
      kept: the metadata that is saved with each state, besides the best held-out loss.
    """

    experiment: Experiment
    files: RunFiles
    tiers: Tiers
    account: Account
    termination: Termination
    writer: Records
    progress: Progress
    heldout: HeldOut
    kept: Mapping[str, Json]

    @property
    def metadata(self) -> dict[str, Json]:
        """The metadata of a state that is saved now."""
        return {"best": self.heldout.best, **self.kept}

    def every(self, steps: int | None) -> Cadence:
        """Return the cadence of a task that is due every `steps` steps and after the last step.

        If `steps` is None, the task is due only after the last step.
        """
        return Cadence(steps, self.experiment.total_steps)


def hooks_of(parts: HookParts) -> list[LoopHook]:
    """Return the hooks of a run's loop, in order."""
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
        compared = parts.every(checked.every), checked, replicas_of(program), tiers.store
        hooks.append(CompareReplicas(*compared, writer, parts.account))
    if experiment.heldout is not None:
        run = partial(_means, parts, experiment.heldout)
        given = run, parts.progress, writer, parts.heldout
        hooks.append(Evaluate(parts.every(config.eval.every), *given))
    # If an agent records failures and the machine's memory holds snapshots, a run continues from a
    # snapshot after a failure. Its checkpoints then protect only against the loss of the machine,
    # which the journal does not record.
    seen = parts.files.agent.sees_failures and config.checkpoint.memory_every is None
    cadence = _cadence(config.checkpoint.every, Activity.CHECKPOINT_BLOCKED, parts, seen=seen)
    hooks.append(Save(cadence, partial(_save, parts)))
    hooks.extend(parts.files.agent.hooks)
    for tier in tiers.snapshots:
        cadence = _cadence(tier.every, Activity.SNAPSHOT, parts, seen=True)
        hooks.append(Snapshot(cadence, partial(_take, parts, tier.snapshots), tier.lasts))
    return hooks


def _means(parts: HookParts, heldout: Loader | RowsLoader, state: TrainState) -> dict[str, float]:
    program, limit = parts.experiment.program, parts.experiment.config.eval.batches
    with (
        parts.account.within(Activity.EVALUATION),
        heldout.evaluation_batches(limit) as batches,
    ):
        return evaluate(program, program.evaluated(state), state.buffers, batches)


def _save(parts: HookParts, state: TrainState, metric: float | None) -> None:
    program, rows = parts.experiment.program, parts.experiment.rows
    with parts.account.within(Activity.CHECKPOINT_BLOCKED):
        if rows is not None and rows.save is not None:
            # The tables are saved before the state, so that a complete checkpoint always has its
            # tables.
            rows.save(int(state.step))
        given = {"metric": metric, "parts": parts.experiment.config.checkpoint.parts}
        save(parts.tiers.store, program, state, metadata=parts.metadata, **given)


def _take(parts: HookParts, snapshots: Snapshots, state: TrainState) -> None:
    with parts.account.within(Activity.SNAPSHOT):
        snapshots.take(int(state.step), state, parts.metadata)


def _cadence(every: int | str, kind: Activity, parts: HookParts, *, seen: bool) -> Cadence:
    """Return a cadence with a fixed interval, or a cadence that chooses its interval itself.

    Args:
      every: the number of steps between two saves, or "auto" if the run chooses the number.
      kind: the activity in the account of time to which the saves belong.
      seen: whether an agent records the failures against which these saves protect.
    """
    if isinstance(every, int):
        return parts.every(every)
    return Chosen(
        None,
        parts.experiment.total_steps,
        kind,
        "a snapshot" if kind is Activity.SNAPSHOT else "a checkpoint",
        parts.account,
        parts.files.directory.path if seen else None,
        3600 * parts.files.config.checkpoint.mttf_hours,
        parts.progress.note,
        parts.writer,
        parts.progress.step,
    )
