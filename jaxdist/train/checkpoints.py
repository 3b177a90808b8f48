"""A program's state to a checkpoint, and back from one that any plan saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxdist.checkpoint.manifest import LeafRecord
from jaxdist.checkpoint.restore import Adapt, Restored, Wanted
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.checkpoint.structure import describe
from jaxdist.train.state import TrainState
from jaxdist.train.step import Program
from jaxdist.types import PyTree

EXCHANGE = "exchange"


def save(
    store: CheckpointStore,
    program: Program,
    state: TrainState,
    *,
    metadata: Mapping[str, Any] | None = None,
    metric: float | None = None,
) -> None:
    """Save a state under its own step; see `CheckpointStore.save`."""
    saved = program.home.to_files(state)
    given = {"metadata": metadata or {}, "metric": metric, "shapes": program.own_shapes}
    store.save(int(state.step), saved, **given)


def restore(
    store: CheckpointStore,
    program: Program,
    *,
    step: int | None = None,
    say: Callable[[str], None] = print,
) -> Restored:
    """The newest whole checkpoint (or that of `step`) as `program` has its state.

    Args:
      say: called with a line where something of the checkpoint is not used.

    Raises:
      CheckpointError: there is none, or none that fits.
    """
    return store.restore(program.state_shapes, step=step, adapt=adapted(program, say))


def adapted(program: Program, say: Callable[[str], None]) -> Adapt:
    """What `program` loads of a checkpoint, and how it becomes a state as devices hold it.

    All but the exchange's state must be as `program` has it. The exchange's own is loaded as it was
    saved and passed through `Exchange.reshard` where another plan had other shapes; it begins anew,
    which is said, where another exchange saved it, or none.
    """
    return partial(_adapted, program, say)


def _adapted(
    program: Program, say: Callable[[str], None], saved: Mapping[str, LeafRecord]
) -> Wanted:
    target, shapes = program.state_shapes, program.own_shapes
    own, found = _of_exchange(describe(target)), _of_exchange(saved)
    if own == found:
        return Wanted(target, shapes, finish=program.home.from_files)
    if own.keys() == found.keys():
        # As they were saved, whole on every device.
        leaves = [
            jax.ShapeDtypeStruct(
                found[name].shape, found[name].dtype, sharding=program.layout.replicated
            )
            for name in own
        ]
        given = jax.tree.unflatten(jax.tree.structure(target.exchange), leaves)
        ignored, finish = frozenset(), partial(_resharded, program)
    else:
        if jax.process_index() == 0:
            say("what the exchange of gradients carries begins anew: another one saved this")
        given, ignored, finish = (), frozenset(found), partial(_begun, program)
    return Wanted(replace(target, exchange=given), replace(shapes, exchange=given), ignored, finish)


def _of_exchange(leaves: Mapping[str, LeafRecord]) -> dict[str, LeafRecord]:
    return {name: leaf for name, leaf in leaves.items() if name.split("/")[0] == EXCHANGE}


def _resharded(program: Program, state: TrainState) -> TrainState:
    shapes = program.state_shapes.exchange
    reshard = jax.jit(
        lambda saved: program.exchange.reshard(saved, shapes), out_shardings=_shardings(shapes)
    )
    return program.home.from_files(replace(state, exchange=reshard(state.exchange)))


def _begun(program: Program, state: TrainState) -> TrainState:
    shapes = program.state_shapes.exchange
    params = program.own_shapes.params

    def begin() -> PyTree:
        zeros = jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), params)
        return program.exchange.init(zeros)

    begun = jax.jit(begin, out_shardings=_shardings(shapes))()
    return program.home.from_files(replace(state, exchange=begun))


def _shardings(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda shape: shape.sharding, shapes)
