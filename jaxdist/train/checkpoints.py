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
from jaxdist.trees import flatten_with_names
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
    own = {f"{EXCHANGE}/{n}": leaf for n, leaf in describe(target.exchange).items()}
    found = {n: leaf for n, leaf in saved.items() if n == EXCHANGE or n.startswith(EXCHANGE + "/")}
    if own == found:
        return Wanted(target, shapes, finish=program.home.from_files)
    if own.keys() == found.keys():
        as_saved = _as_saved(program, target.exchange, found)
        finish = partial(_resharded, program)
    else:
        if jax.process_index() == 0:
            say("what the exchange of gradients carries begins anew: another one saved this")
        as_saved, finish = (), partial(_begun, program)
    return Wanted(
        replace(target, exchange=as_saved),
        replace(shapes, exchange=as_saved),
        ignored=(EXCHANGE + "/",) if own.keys() != found.keys() else (),
        finish=finish,
    )


def _as_saved(program: Program, state: PyTree, found: Mapping[str, LeafRecord]) -> PyTree:
    """Shapes of an exchange's state as they were saved, whole on every device."""
    named = [name for name, _ in flatten_with_names(state)]
    leaves = [
        jax.ShapeDtypeStruct(record.shape, record.dtype, sharding=program.layout.replicated)
        for record in (found[f"{EXCHANGE}/{name}"] for name in named)
    ]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


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
