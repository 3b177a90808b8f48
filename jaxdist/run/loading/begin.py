"""Functions for a run that begins with a part of another run's state, or with a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax

from jaxdist.checkpoint.layout import step_directory
from jaxdist.checkpoint.manifest import LeafRecord
from jaxdist.checkpoint.parts import BeginWith, check_part, taken
from jaxdist.checkpoint.restore import Restored, Wanted, restore_as, valid_manifests
from jaxdist.errors import CheckpointError
from jaxdist.models.tuning.lora import PREFIX
from jaxdist.run.directory import RunDirectory
from jaxdist.run.loading.misordered import check_order
from jaxdist.run.loading.model import initial_state, is_downloaded_model, matched
from jaxdist.train.parts import only, part_names
from jaxdist.train.state import TrainState
from jaxdist.train.step import Program
from jaxdist.trees import flatten_with_names
from jaxdist.types import PyTree

ADAPTERS = f"params/{PREFIX}/"
"""The prefix of the paths of adapters in a state."""


def begin_with(
    program: Program, begin: BeginWith, *, say: Callable[[str], None]
) -> tuple[TrainState, int]:
    """Return an initial state with a part of another run's state, and the step of that part.

    The part is loaded bit for bit. The rest of the state is initialized as in a new run with these
    parameters: moments are zero, and master weights are copies of the parameters. The returned
    state has step 0. The returned step is the step of the checkpoint, or 0 for a downloaded model.

    Raises:
      CheckpointError: the run or the checkpoint does not exist, the checkpoint lacks the part, or
        the part does not fit.
      ConfigError: the program's state does not have the part.
    """
    names = check_begin(program, begin)
    if is_downloaded_model(Path(begin.run)):
        state = initial_state(program, matched(program, Path(begin.run)))
        return _restarted(program, program.home.from_files(state)), 0
    directory = RunDirectory(Path(begin.run))
    restored = load_part(directory, program, names, step=begin.step, say=say)
    return restored.state, restored.step


def check_begin(program: Program, begin: BeginWith) -> list[str]:
    """Check that a run can begin with a part, and return the names of the part's arrays.

    The check reads manifests only.

    Raises:
      CheckpointError: the run or the checkpoint does not exist, the checkpoint lacks the part, or
        the part does not fit.
      ConfigError: the program's state does not have the part.
    """
    directory = RunDirectory(Path(begin.run)).checkpoints
    if is_downloaded_model(Path(begin.run)):
        if begin.parts != ("params",) or begin.step is not None:
            raise CheckpointError(
                f"{begin.run} is a model, which can be loaded only completely: leave out "
                "checkpoint.begin_with.parts and .step, or convert the model into a run with "
                "`jaxdist import`"
            )
        return [f"params/{leaf.name}" for leaf in matched(program, Path(begin.run))]
    names = [name for name in part_names(program, begin.parts) if name != "step"]
    if not directory.is_dir():
        raise CheckpointError(
            f"{begin.run} is not a run with checkpoints, since it has no {directory.name}: give "
            "the directory that `jaxdist train` printed after the word run"
        )
    manifests = {manifest.step: manifest for manifest in valid_manifests(directory)}
    step = max(manifests, default=0) if begin.step is None else begin.step
    if step not in manifests:
        raise CheckpointError(
            f"{directory} has no checkpoint of step {step}; choose from steps {list(manifests)}"
        )
    saved = manifests[step].leaves
    # Adapters that are missing from the checkpoint are not loaded: they keep their initial values.
    names = [name for name in names if name in saved or not name.startswith(ADAPTERS)]
    where = str(step_directory(directory, step))
    check_part(manifests[step].leaves, only(program.own_shapes, names), where=where)
    return names


def holds_parameters_only(directory: RunDirectory, step: int | None = None) -> bool:
    """Return whether a checkpoint of a run contains only parameters and buffers.

    The argument `step` selects the checkpoint; None selects the newest checkpoint. The checkpoint
    of an imported model, for example, contains nothing else. Return False if there is no
    checkpoint.
    """
    manifests = valid_manifests(directory.checkpoints) if directory.checkpoints.is_dir() else []
    found = [m for m in manifests if step in (None, m.step)]
    return bool(found) and all(n.startswith(("params/", "buffers/")) for n in found[-1].leaves)


def load_part(
    directory: RunDirectory,
    program: Program,
    names: Sequence[str],
    *,
    step: int | None = None,
    say: Callable[[str], None],
) -> Restored:
    """Return an initial state in which the named arrays come from a run's checkpoint.

    The argument `step` selects the checkpoint; None selects the newest complete checkpoint.

    Raises:
      CheckpointError: there is no such checkpoint, the checkpoint lacks an array, or an array does
        not fit.
    """
    finish = partial(_begun, program, frozenset(names))
    return _restored(directory, program, names, finish, step=step, say=say)


def load_parameters(
    directory: RunDirectory,
    program: Program,
    *,
    step: int | None = None,
    say: Callable[[str], None],
) -> Restored:
    """Return a state with only the parameters and buffers of a run's checkpoint.

    All other leaves are None: nothing is initialized, so that devices hold no optimizer state.

    Args:
      step: the step of the checkpoint, or None for the newest complete checkpoint.
      say: the function that is called with a line about each skipped part of the checkpoint.

    Raises:
      CheckpointError: there is no such checkpoint, or an array is missing from the checkpoint or
        does not fit.
    """
    names = taken(("params", "buffers"), [n for n, _ in flatten_with_names(program.own_shapes)])

    def finish(loaded: TrainState) -> TrainState:
        return replace(loaded, params=program.home.from_files.params(loaded.params))

    return _restored(directory, program, names, finish, step=step, say=say)


def _restored(
    directory: RunDirectory,
    program: Program,
    names: Sequence[str],
    finish: Callable[[PyTree], TrainState],
    *,
    step: int | None,
    say: Callable[[str], None],
) -> Restored:
    """Load only the named arrays of a run's checkpoint, and convert them by `finish`."""
    chosen = frozenset(names)

    def adapt(saved: Mapping[str, LeafRecord]) -> Wanted:
        target, shapes = (only(s, chosen) for s in (program.state_shapes, program.own_shapes))
        check_part(saved, shapes, where=str(directory.checkpoints))
        return Wanted(target, shapes, frozenset(saved) - chosen, finish)

    restored = restore_as(directory.checkpoints, adapt, step=step, on_event=say)
    check_order(directory, restored.step)
    return restored


def _begun(program: Program, names: frozenset[str], loaded: PyTree) -> TrainState:
    """Return an initial state with the loaded arrays.

    The loaded arrays have the form that checkpoints hold (`jaxdist.train.home`).
    """
    home = program.home
    state = home.from_files(_merged(home.to_files(program.init()), loaded))
    # `_restarted` initializes the optimizer's state, so the loaded parts of this state are set
    # again.
    return _merged(_restarted(program, state), only(state, names))


def _merged(state: TrainState, part: PyTree) -> TrainState:
    given = dict(flatten_with_names(part))
    leaves = [given.get(name, leaf) for name, leaf in flatten_with_names(state)]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def _restarted(program: Program, state: TrainState) -> TrainState:
    """Return the state, with optimizer state and slow weights initialized from its parameters."""

    def restart(stored: TrainState) -> TrainState:
        own = program.home.used(stored)
        trained = program.model.divided(own.params)[0]
        opt_state = program.optimizer.transform.init(trained)
        outer = () if program.outer is None else program.outer.begin(trained)
        return program.home.stored(replace(own, opt_state=opt_state, outer=outer))

    shardings = jax.tree.map(lambda shape: shape.sharding, program.state_shapes)
    return jax.jit(restart, out_shardings=shardings)(state)
