"""The first state of a process: initial, saved by the run, or a part of another run's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxdist.checkpoint.agree import broadcast_json
from jaxdist.checkpoint.layout import steps_present
from jaxdist.experiment import Experiment
from jaxdist.run.checkpoints import restore
from jaxdist.run.directory import RunDirectory
from jaxdist.run.loading.begin import begin_with
from jaxdist.run.loading.misordered import check_order
from jaxdist.run.memory import check_state_fits
from jaxdist.run.tiers import Tiers
from jaxdist.train.state import TrainState
from jaxdist.types import Json

Beginning = tuple[TrainState, Mapping[str, Json]]
"""A state and the metadata that was saved with the state; the metadata of a new run is empty."""


def beginning(
    experiment: Experiment,
    directory: RunDirectory,
    tiers: Tiers,
    say: Callable[[str], None],
    *,
    resume: bool,
) -> Beginning:
    """Load the newest complete state of a resumed run, or create the first state of a new run.

    A resumed run that has not saved a state also begins with a first state.

    Args:
      say: the function that prints a line with rich's markup.

    Raises:
      RunError: the state does not fit in the devices' memory.
      CheckpointError: no saved state is undamaged, or the saved state has other arrays than the
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
    # Process 0 decides, because restoring is collective, and other hosts may see new files of a
    # shared disk later.
    if not broadcast_json(bool(steps_present(tiers.store.directory))):
        return None
    saved = restore(tiers.store, program, say=say)
    check_order(directory, saved.step)
    say(f"resume from step {saved.step} of {total}")
    return saved.state, saved.metadata


def _first(experiment: Experiment, say: Callable[[str], None]) -> Beginning:
    program, begin = experiment.program, experiment.config.checkpoint.begin_with
    if begin is None:
        return program.init(), {}
    state, step = begin_with(program, begin, say=say)
    say(f"begin  with {', '.join(begin.parts)} of step {step} of {begin.run}")
    return state, {}
