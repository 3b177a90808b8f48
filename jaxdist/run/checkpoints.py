"""Functions that save a program's state as a checkpoint, and load the checkpoint of any plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.checkpoint.manifest import LeafRecord
from jaxdist.checkpoint.restore import Adapt, Restored, Wanted
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.checkpoint.structure import describe_arrays
from jaxdist.errors import CompressionError
from jaxdist.optim.safety import SkipState
from jaxdist.train.parts import only, part_names
from jaxdist.train.state import TrainState
from jaxdist.train.step import Program
from jaxdist.types import OptState, Params, PyTree


def save(
    store: CheckpointStore,
    program: Program,
    state: TrainState,
    *,
    metadata: Mapping[str, Any] | None = None,
    metric: float | None = None,
    parts: Sequence[str] | None = None,
) -> None:
    """Save a state as the checkpoint of the state's step; see `CheckpointStore.save`.

    Args:
      metadata, metric: the arguments of `CheckpointStore.save`; None means no metadata and no
        metric.
      parts: the patterns of the parts to save (`jaxdist.checkpoint.parts`); None saves all parts.
    """
    saved, shapes = program.home.to_files(state), program.own_shapes
    if parts is not None:
        names = part_names(program, parts)
        saved, shapes = only(saved, names), only(shapes, names)
    given = {"metadata": metadata or {}, "metric": metric, "shapes": shapes}
    store.save(int(state.step), saved, **given)


def restore(
    store: CheckpointStore,
    program: Program,
    *,
    step: int | None = None,
    say: Callable[[str], None] = print,
) -> Restored:
    """Restore the newest complete checkpoint, or the checkpoint of step `step`, for `program`.

    Args:
      say: the function that is called with a line about each part of the checkpoint that is not
        used.

    Raises:
      CheckpointError: there is no checkpoint, or no checkpoint fits `program`.
    """
    return store.restore_as(adapted(program, say), step=step)


def adapted(program: Program, say: Callable[[str], None]) -> Adapt:
    """Return a function that chooses the arrays that `program` loads, and converts the state.

    All parts except the states of exchanges must have the shapes and dtypes that `program` has. The
    state of the gradient exchange may have other shapes if another plan saved it. In that case,
    `Exchange.reshard` converts the state after the load. The state of the exchange between steps
    has the same shapes in every plan. If the checkpoint has no usable state of an exchange, the
    exchange starts from its initial state, and `say` is called with a line that reports this.
    """
    return partial(_adapted, program, say)


def _adapted(
    program: Program, say: Callable[[str], None], saved: Mapping[str, LeafRecord]
) -> Wanted:
    own, given, ignored = describe_arrays(program.own_shapes), {}, frozenset[str]()
    for name, why in _WHY_FRESH.items():
        wanted, found = _part(own, name), _part(saved, name)
        if wanted == found:
            continue
        given[name] = _as_saved(program, wanted, found) if name == "exchange" else None
        if given[name] is None:
            ignored |= found.keys()
            if jax.process_index() == 0:
                say(f"the state of {why}")
    skips = _skips(program, saved)
    placed = {name: () if part is None else part for name, part in given.items()}
    target, shapes = (
        replace(s, **placed, opt_state=skips.as_saved(s.opt_state))
        for s in (program.state_shapes, program.own_shapes)
    )
    finish = partial(_finished, program, given, skips)
    return Wanted(target, shapes, ignored, finish)


_WHY_FRESH = {
    "exchange": "the gradient exchange starts from zero, because the checkpoint was saved with a "
    "different plan",
    "outer": "the strategy starts from zero, because the checkpoint was saved with a different "
    "strategy",
}
"""The message about each field of the state that is initialized if no saved state is usable."""


class Skips(NamedTuple):
    """The conversions of an optimizer's state between a program and a checkpoint.

    The two states differ if only one of them counts skipped steps. The conversions add the
    counters, as zeros, or drop them. By default the conversions change nothing.

    Attributes:
      as_saved: the function from the optimizer state of the program to the optimizer state of the
        checkpoint.
      as_own: the inverse function.
    """

    as_saved: Callable[[OptState], OptState] = lambda state: state
    as_own: Callable[[OptState], OptState] = lambda state: state


def _skips(program: Program, saved: Mapping[str, LeafRecord]) -> Skips:
    """Return the conversion of the optimizer's state between `program` and a checkpoint.

    If only the program has counters of skipped steps, the conversion adds them with the value zero.
    If only the checkpoint has them, the conversion drops them. Otherwise the conversion does
    nothing.

    An exchange of compressed messages counts skipped steps itself. The optimizer states of plans
    with and without such messages therefore differ only in these counters.
    """
    own = program.own_shapes.opt_state
    counts = isinstance(own, SkipState)
    if counts == ("opt_state/skipped" in saved) or (counts and own.rule is not None):
        return Skips()
    replicated = NamedSharding(program.layout.mesh, PartitionSpec())
    count: PyTree = jax.ShapeDtypeStruct((), jax.numpy.int32, sharding=replicated)

    def counted(inner: OptState) -> OptState:
        return SkipState(inner, count, count, None)

    def from_zero(inner: OptState) -> OptState:
        zero = np.zeros((), np.int32)
        skipped, consecutive = (jax.device_put(zero, replicated) for _ in range(2))
        return SkipState(inner, skipped, consecutive, None)

    def inner(state: OptState) -> OptState:
        return state.inner

    return Skips(inner, from_zero) if counts else Skips(counted, inner)


def _as_saved(
    program: Program, wanted: Mapping[str, LeafRecord], found: Mapping[str, LeafRecord]
) -> PyTree | None:
    """Return the shapes in which to load an exchange's saved state, or None if it is not usable.

    If the number of devices divides the first dim of a leaf, the leaf is split over all devices
    along that dim. Other leaves are replicated. The state is not usable if another exchange saved
    it, or if it cannot be converted to this plan.

    Args:
      program: the program that loads the state.
      wanted: the leaves of the program's exchange state, by path.
      found: the leaves of the saved exchange state, by path.
    """
    if wanted.keys() != found.keys():
        return None
    mesh = program.layout.mesh

    def lying(shape: tuple[int, ...]) -> NamedSharding:
        rows = mesh.axis_names if shape and shape[0] % mesh.size == 0 else None
        return NamedSharding(mesh, PartitionSpec(rows))

    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lying(tuple(leaf.shape)))
        for leaf in (found[name] for name in wanted)
    ]
    saved = jax.tree.unflatten(jax.tree.structure(program.own_shapes.exchange), leaves)
    # A trace shows, before anything is loaded, whether the exchange can convert the state.
    try:
        jax.eval_shape(program.exchange.reshard, saved, program.own_shapes.exchange)
    except CompressionError:
        return None
    return saved


def _part(leaves: Mapping[str, LeafRecord], name: str) -> dict[str, LeafRecord]:
    """Return the leaves of one field of the state, by path; the field may itself be a leaf."""
    return {path: leaf for path, leaf in leaves.items() if path.split("/")[0] == name}


def _finished(
    program: Program, given: Mapping[str, PyTree | None], skips: Skips, state: TrainState
) -> TrainState:
    """Convert a loaded state to the form that devices store between steps (`jaxdist.train.home`).

    Args:
      given: for each field that was saved with other shapes than the program's, the shapes in which
        the field was loaded, or None if the field is initialized instead.
      skips: the conversion that adds or removes the counters of skipped steps in the loaded
        optimizer state, as the program requires.
    """
    state = replace(state, opt_state=skips.as_own(state.opt_state))
    if "exchange" in given:
        fresh = given["exchange"] is None
        exchange = fresh_exchange(program) if fresh else _resharded(program, state.exchange)
        state = replace(state, exchange=exchange)
    if "outer" not in given:
        return program.home.from_files(state)
    # No state of the strategy was loaded: `outer` is the placeholder (), which must not be
    # converted.
    stored = replace(program.home.from_files, with_outer=False)(state)
    return replace(stored, outer=_begun_outer(program, stored.params))


def _resharded(program: Program, saved: PyTree) -> PyTree:
    shapes = program.state_shapes.exchange
    reshard = jax.jit(
        lambda saved: program.exchange.reshard(saved, shapes), out_shardings=_shardings(shapes)
    )
    return reshard(saved)


def fresh_exchange(program: Program) -> PyTree:
    """Return the state of the gradient exchange before the first step, on the mesh's devices."""
    params = program.own_shapes.params

    def begin() -> PyTree:
        zeros = jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), params)
        return program.exchange.init(zeros)

    return jax.jit(begin, out_shardings=_shardings(program.state_shapes.exchange))()


def _begun_outer(program: Program, params: Params) -> PyTree:
    """Return the initial state of the exchange between steps, for the given stored parameters."""
    outer, home = program.outer, program.home
    if outer is None:
        return ()

    def begin(params: Params) -> PyTree:
        trained = program.model.divided(home.used.params(params))[0]
        return home.stored.outer(outer.begin(trained))

    return jax.jit(begin, out_shardings=_shardings(program.state_shapes.outer))(params)


def _shardings(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda shape: shape.sharding, shapes)
