"""The hooks of a run: what its config asks for between steps, and what an agent does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from jaxdist.checkpoint.snapshots import Snapshots
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.experiment import Experiment
from jaxdist.metrics.account import Kind
from jaxdist.metrics.progress import Progress
from jaxdist.metrics.writer import MetricsWriter
from jaxdist.run.checkpoints import save
from jaxdist.run.hooks.loop import (
    Between,
    Cadence,
    Evaluate,
    Guard,
    Log,
    LoopHook,
    RunHooks,
    Save,
    Snapshot,
    Stop,
)
from jaxdist.run.replicas import CompareReplicas
from jaxdist.run.watch.saves import Chooser, Chosen
from jaxdist.run.watch.told import Tell
from jaxdist.train.evaluate import evaluate
from jaxdist.train.replicas import replicas_of
from jaxdist.train.state import TrainState
from jaxdist.types import Json

if TYPE_CHECKING:
    from jaxdist.run.job import RunJob


def hooks_of(
    job: RunJob,
    experiment: Experiment,
    store: CheckpointStore,
    writer: MetricsWriter | None,
    progress: Progress,
    metadata: Mapping[str, Json],
) -> tuple[RunHooks, Evaluate | None]:
    """What happens between steps of any run; and what evaluates, if something does."""
    config, program, heldout = job.config, experiment.program, experiment.heldout

    def held_out(state: TrainState) -> dict[str, float]:
        assert heldout is not None
        with (
            job.account.within(Kind.EVALUATION),
            heldout.evaluation_batches(config.eval.batches) as batches,
        ):
            return evaluate(program, program.evaluated(state), state.buffers, batches)

    def saved(state: TrainState, best: float | None, metric: float | None) -> None:
        with job.account.within(Kind.CHECKPOINT_BLOCKED):
            given = {"metric": metric, "parts": config.checkpoint.parts}
            metadata = {"best": best, **job.kept}
            save(store, program, state, metadata=metadata, **given)

    def every(steps: int | None) -> Cadence:
        return Cadence(steps, experiment.total_steps)

    checked = config.train.check_replicas
    # A flipped bit may also make numbers infinite; those of the run itself do so again.
    restores = 0 if checked is None else min(checked.restores, 1)
    guard = Guard(program.metrics, store, program.optimizer.max_skipped, restores)
    measured: Evaluate | None = None
    hooks: list[LoopHook] = [guard, Log(every(config.train.log_every), guard, progress, writer)]
    hooks.append(Stop(job.termination))
    if program.outer is not None:
        hooks.append(Between(program.outer, program.between))
    if checked is not None:
        compared = checked, every(checked.every), replicas_of(program), store
        hooks.append(CompareReplicas(*compared, writer, job.account))
    if heldout is not None:
        best = metadata.get("best")
        measured = Evaluate(every(config.eval.every), held_out, progress, writer, best)
        hooks.append(measured)
    given = (job, experiment, writer, progress)
    # What an agent sees fail goes on from memory; disk is for what takes the machine too.
    own = job.watcher is not None and config.checkpoint.memory_every is None
    cadence = _cadence(config.checkpoint.every, Kind.CHECKPOINT_BLOCKED, *given, seen=own)
    hooks.append(Save(cadence, saved, measured))
    return RunHooks(hooks), measured


def _cadence(
    every: int | str,
    kind: Kind,
    job: RunJob,
    experiment: Experiment,
    writer: MetricsWriter | None,
    progress: Progress,
    *,
    seen: bool,
) -> Cadence:
    """So many steps, or what the run chooses.

    Args:
      seen: whether failures that an agent writes down are those that such a save is for.
    """
    if isinstance(every, int):
        return Cadence(every, experiment.total_steps)
    chooser = Chooser(
        kind,
        "a snapshot" if kind is Kind.SNAPSHOT else "a checkpoint",
        job.account,
        job.directory.path if seen else None,
        3600 * job.config.checkpoint.mttf_hours,
        progress.note,
        writer,
        progress.step,
    )
    return Chosen(chooser, progress.step, experiment.total_steps)


def watching(
    job: RunJob,
    experiment: Experiment,
    tiers: tuple[Snapshots | None, Snapshots | None],
    measured: Evaluate | None,
    writer: MetricsWriter | None,
    progress: Progress,
) -> Iterator[LoopHook]:
    """What is done for an agent, and for who goes on.

    Args:
      tiers: snapshots in memory, and on this machine's disk.
    """
    if job.watcher is not None:
        yield Tell(job.watcher.publisher.step, job.watcher.publisher.wait)
    config = job.config.checkpoint

    def taking(snapshots: Snapshots) -> Callable[[TrainState], None]:
        def take(state: TrainState) -> None:
            best = None if measured is None else measured.best
            with job.account.within(Kind.SNAPSHOT):
                snapshots.take(int(state.step), state, {"best": best, **job.kept})

        return take

    memory, local = tiers
    if memory is not None:
        assert config.memory_every is not None, "there are no snapshots without it"
        given = (job, experiment, writer, progress)
        cadence = _cadence(config.memory_every, Kind.SNAPSHOT, *given, seen=True)
        yield Snapshot(cadence, taking(memory))
    if local is not None:
        assert config.local is not None, "there are no snapshots without it"
        yield Snapshot(
            Cadence(config.local.every, experiment.total_steps), taking(local), lasts=True
        )
