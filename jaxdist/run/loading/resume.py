"""The first state of a process: initial, saved by the run, or with parts of another run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax

from jaxdist.checkpoint.agree import broadcast_json
from jaxdist.checkpoint.layout import steps_present
from jaxdist.checkpoint.snapshots import whole_steps
from jaxdist.config import read, resolved_yaml
from jaxdist.errors import CheckpointError
from jaxdist.experiment import Experiment
from jaxdist.run.checkpoints import restore
from jaxdist.run.directory import RunDirectory
from jaxdist.run.loading.begin import begin_with
from jaxdist.run.loading.misordered import check_order
from jaxdist.run.memory import check_state_fits
from jaxdist.run.report.changes import changes
from jaxdist.run.tiers import Tiers
from jaxdist.tables.training.files import about_tables, tables_problem
from jaxdist.train.state import TrainState
from jaxdist.train.strategy.config import Hybrid
from jaxdist.types import Json

Beginning = tuple[TrainState, Mapping[str, Json]]
"""A state, and the metadata that was saved with it; a new run has empty metadata."""


def beginning(
    experiment: Experiment,
    directory: RunDirectory,
    tiers: Tiers,
    say: Callable[[str], None],
    *,
    resume: bool,
) -> Beginning:
    """Load the newest complete state of a resumed run, or create the first state of a new run.

    A resumed run that has not yet saved a state begins as a new run does.

    Args:
      say: the function that prints a line with rich's markup.

    Raises:
      RunError: the state does not fit in the devices' memory.
      CheckpointError: every saved state is damaged, or the saved state has other arrays than the
        program.
    """
    check_state_fits(experiment.program.state_shapes)
    if resume:
        found = _newest(experiment, directory, tiers, say)
        if found is not None:
            return found
        say("resume: there is no checkpoint yet, so this run begins at step 0")
    return _first(experiment, say)


def _newest(
    experiment: Experiment, directory: RunDirectory, tiers: Tiers, say: Callable[[str], None]
) -> Beginning | None:
    program, total = experiment.program, experiment.total_steps
    found = tiers.newest(program.state_shapes, say)
    if found is not None:
        state, metadata, where = found
        say(f"resume from step {state.step} of {total}, kept {where}")
        return state, metadata
    # Process 0 decides, because a restore is collective, and other hosts may see new files of a
    # shared disk later than process 0.
    if not broadcast_json(bool(steps_present(tiers.store.directory))):
        _check_snapshots(experiment, directory, tiers)
        return None
    saved = restore(tiers.store, program, say=say)
    check_order(directory, saved.step)
    _check_tables(experiment, directory, saved.step)
    say(f"resume from step {saved.step} of {total}")
    return saved.state, saved.metadata


def _check_snapshots(experiment: Experiment, directory: RunDirectory, tiers: Tiers) -> None:
    """Check that snapshots, if there are any, were saved by the model that the config now has.

    Raises:
      CheckpointError: there are snapshots, and the run began with another model.
    """

    def problem() -> str | None:
        steps = [step for tier in tiers.snapshots for step in whole_steps(tier.snapshots.folder)]
        if not steps:
            return None
        lines = changes(read(directory.config).values, resolved_yaml(experiment.config))
        told = ", ".join(line for line in lines if line.startswith("model."))
        return told and (
            f"the run in {directory.path} has snapshots up to step {max(steps)}, which do not fit "
            f"the changed model: {told}; resume with the run's first model, or start a run in "
            "a new directory"
        )

    _check_in_process_0(problem)


def _check_tables(experiment: Experiment, directory: RunDirectory, step: int) -> None:
    """Check the tables of a run on servers before any file of the run is replaced.

    Raises:
      CheckpointError: the tables of the step have another form than the config's tables.
    """
    strategy = experiment.config.strategy
    if experiment.rows is None or not isinstance(strategy, Hybrid):
        return
    about = about_tables(experiment.rows, strategy.optimizer)
    _check_in_process_0(lambda: tables_problem(directory.path, step, about))


def _check_in_process_0(problem: Callable[[], str | None]) -> None:
    """Raise the problem that process 0 finds, if any, in all processes."""
    told = broadcast_json(problem() if jax.process_index() == 0 else None)
    if told:
        raise CheckpointError(told)


def _first(experiment: Experiment, say: Callable[[str], None]) -> Beginning:
    program, begin = experiment.program, experiment.config.checkpoint.begin_with
    if begin is None:
        return program.init(), {}
    state, step = begin_with(program, begin, say=say)
    say(f"begin  with {', '.join(begin.parts)} of step {step} of {begin.run}")
    return state, {}
