"""What one layer is, and how shards of it add up to one norm.

A leaf may hold many layers, stacked for a scan over layers; it may also be one device's shard of
the whole. Both are facts about the program, known before any number is: they are worked out here
from logical dims and partition specs, so that the arithmetic elsewhere asks no questions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxdist.errors import ConfigError, did_you_mean
from jaxdist.trees import flatten_with_names
from jaxdist.types import Dims, Leaf, Params, PyTree, Specs

FOLD = 16
"""How far a sum is shortened in its first pass: the most that XLA:CPU unrolls and vectorises."""

StepCount: TypeAlias = Any
"""An int32 scalar. (A more exact type would clash with the method `count` of named tuples.)"""
Squares = tuple[jax.Array, ...]
"""Sums of squares of one leaf's tensors: float32, the leaf's rank, 1 where a dim was summed."""


def layer_dims(
    params: Params, dims: Mapping[str, Dims], names: Sequence[str] = ("layers",)
) -> PyTree:
    """For each parameter its dims, of which those that `names` does not have are None.

    Args:
      dims: logical dims of each parameter, by '/'-joined name.
      names: "layers" separates stacked layers; add "heads" or "expert" for one norm each.

    Raises:
      ConfigError: a name that no parameter has ("layers" excepted: not all models stack).

    >>> layer_dims({"w": jnp.ones((4, 2, 3))}, {"w": ("layers", "embed", "mlp")})
    {'w': ('layers', None, None)}
    """
    known = sorted({dim for found in dims.values() for dim in found if dim})
    for name in names:
        if name not in known and name != "layers":
            raise ConfigError(
                f"layer_dims: no parameter has a dim {name!r}: {did_you_mean(name, known)}"
            )
    found = [
        tuple(dim if dim in names else None for dim in dims[name])
        for name, _ in flatten_with_names(params)
    ]
    return jax.tree.unflatten(jax.tree.structure(params), found)


@dataclass(frozen=True)
class LayeredLeaf:
    """One leaf of the parameters as the trust ratio sees it.

    Attributes:
      kept: positions of the dims whose every index is a layer of its own.
      split: manual mesh axes that split each dim.
    """

    name: str
    ndim: int
    kept: tuple[int, ...]
    split: tuple[tuple[str, ...], ...]

    @property
    def summed(self) -> tuple[int, ...]:
        """Positions of the dims that a norm sums over."""
        return tuple(i for i in range(self.ndim) if i not in self.kept)

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """Manual axes over which shards of one layer lie."""
        return tuple(axis for i in self.summed for axis in self.split[i])

    @property
    def kept_axes(self) -> tuple[str, ...]:
        """Manual axes that give each device other layers."""
        return tuple(axis for i in self.kept for axis in self.split[i])

    def squares(self, *tensors: jax.Array) -> Squares:
        """Sums of squares of this device's part, one a layer; computed in float32."""
        return tuple(jnp.sum(_square(x), self.summed, keepdims=True) for x in tensors)

    def squares_in_one_pass(self, *tensors: jax.Array) -> Squares:
        """The same, for tensors that are worked out from the same others as they are summed."""
        folded = self._folded([_square(x) for x in tensors])
        return tuple(jnp.sum(x, self.summed, keepdims=True) for x in folded)

    def _folded(self, tensors: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The tensors with one summed dim shortened up to `FOLD` times, in one pass over all.

        Two sums to one number each are two passes; in one pass they are two chains of additions,
        each waiting for the one before. Here all elements of a row are added side by side.
        """
        rows = [i for i in self.summed if i != self.ndim - 1]
        shape = tensors[0].shape if tensors else ()
        factors = [(_divisor(shape[i]), i) for i in rows]
        factor, dim = max(factors, default=(1, 0))
        # Along an automatic axis XLA holds shards, and to cut between their ends it would gather.
        if factor == 1 or any(_automatic(x) for x in tensors):
            return tensors
        split = (*shape[:dim], shape[dim] // factor, factor, *shape[dim + 1 :])
        return jax.lax.reduce(
            [x.reshape(split) for x in tensors],
            [jnp.float32(0)] * len(tensors),
            lambda left, right: [a + b for a, b in zip(left, right, strict=True)],
            (dim + 1,),
        )


def _square(x: jax.Array) -> jax.Array:
    return jnp.square(x.astype(jnp.float32))


def _divisor(size: int) -> int:
    """The largest divisor up to `FOLD`."""
    return max(k for k in range(1, FOLD + 1) if size % k == 0)


def _automatic(x: jax.Array) -> bool:
    """Whether XLA may have split the array along an automatic mesh axis."""
    mesh = jax.typeof(x).sharding.mesh
    return any(mesh.shape[axis] > 1 for axis in (*mesh.auto_axes, *mesh.explicit_axes))


def describe(params: Params, layer_dims: PyTree = None, specs: Specs = None) -> list[LayeredLeaf]:
    """The leaves of `params` in order.

    Args:
      layer_dims: a tree like the parameters, of the dims of each: the name of a dim whose every
        index has a norm of its own, None for one that a norm sums over, as `["layers", None, None]`
        for a stack of matrices (the function `layer_dims` makes it from all logical dims). None in
        a parameter's place, or in that of the tree, is one norm a parameter.
      specs: a tree of partition specs, as given to `jax.shard_map`; outside of it they change
        nothing. None: no leaf is split.

    Raises:
      ConfigError: a dim that the leaf does not have; an axis that the mesh does not have; a tree of
        another structure.
    """
    named = flatten_with_names(params)
    nothing = [None] * len(named)
    kept_of = nothing if layer_dims is None else _aligned(params, layer_dims, "layer_dims")
    spec_of = [PartitionSpec()] * len(named) if specs is None else _aligned(params, specs, "specs")
    leaves = zip(named, kept_of, spec_of, strict=True)
    return [
        LayeredLeaf(name, x.ndim, _positions(name, x, keep), _split(name, x, spec))
        for (name, x), keep, spec in leaves
    ]


def _aligned(params: Params, tree: PyTree, name: str) -> list[Leaf]:
    try:
        return jax.tree.structure(params).flatten_up_to(tree)
    except ValueError as error:
        raise ConfigError(
            f"{name} must be a tree of the parameters' own structure: {error}"
        ) from error


def _positions(name: str, x: jax.Array, dims: Sequence[str | None] | None) -> tuple[int, ...]:
    if dims is None:
        return ()
    shown = f"layer_dims of parameter {name or 'params'} {x.shape}: {dims!r} names"
    example = ("layers", *(None,) * (x.ndim - 1))
    remedy = f"name a dim whose every index has a norm of its own, None the others, as {example}"
    if not isinstance(dims, tuple | list) or not all(d is None or isinstance(d, str) for d in dims):
        raise ConfigError(f"{shown} no dims; {remedy}")
    if len(dims) != x.ndim:
        raise ConfigError(f"{shown} {len(dims)} dims, but it has {x.ndim}; {remedy}")
    return tuple(i for i, dim in enumerate(dims) if dim is not None)


def _split(name: str, x: jax.Array, spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
    if len(spec) > x.ndim:
        raise ConfigError(
            f"spec of parameter {name or 'params'} {x.shape}: {spec} has {len(spec)} entries for "
            f"{x.ndim} dims"
        )
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(mesh.manual_axes)
    entries = [(entry,) if isinstance(entry, str) else (entry or ()) for entry in spec]
    for axis in (axis for entry in entries for axis in entry):
        if manual and axis not in mesh.axis_names:
            raise ConfigError(
                f"spec of parameter {name or 'params'} {x.shape}: {spec} names no mesh axis "
                f"{axis!r}: {did_you_mean(axis, map(str, mesh.axis_names))}"
            )
    # An auto axis is XLA's: there the arrays are whole, and a sum over them is already the sum.
    split = [tuple(axis for axis in entry if axis in manual) for entry in entries]
    return (*split, *((),) * (x.ndim - len(split)))


def whole(leaf: LayeredLeaf) -> LayeredLeaf:
    """The same leaf with one norm over all of it."""
    return replace(leaf, kept=())


def add_shards(squares: Sequence[Squares], leaves: Sequence[LayeredLeaf]) -> list[Squares]:
    """The sums of squares over all shards of each layer, in one all-reduce for the whole tree.

    Cost: one `psum` of at most two float32 for each layer of the split leaves; leaves that are not
    split take no part. Without split leaves it is the identity.
    """
    axes = tuple(dict.fromkeys(axis for leaf in leaves for axis in leaf.summed_axes))
    if not axes:
        return list(squares)
    mine = [i for i, leaf in enumerate(leaves) if leaf.summed_axes]
    placed = [_place(jnp.stack(squares[i]), leaves[i], axes) for i in mine]
    total = jax.lax.psum(jnp.concatenate([x.ravel() for x in placed]), axes)
    summed, start = list(squares), 0
    for i, sent in zip(mine, placed, strict=True):
        part = total[start : start + sent.size].reshape(sent.shape)
        summed[i] = tuple(_take(part, leaves[i], axes))
        start += sent.size
    return summed


def _mixed(leaf: LayeredLeaf, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Axes of the fused sum along which this leaf's devices hold different layers."""
    return tuple(axis for axis in leaf.kept_axes if axis in axes)


def _place(stacked: jax.Array, leaf: LayeredLeaf, axes: tuple[str, ...]) -> jax.Array:
    """What this device adds to the sum: nothing that another device adds too.

    `[tensors, ...]` to `[devices along mixed axes, tensors, ...]`.
    """
    for axis in axes:
        if axis not in leaf.summed_axes and axis not in leaf.kept_axes:
            stacked = jnp.where(jax.lax.axis_index(axis) == 0, stacked, 0.0)
    mixed = _mixed(leaf, axes)
    if not mixed:
        return stacked[None]
    slots = jnp.arange(math.prod(jax.lax.axis_size(axis) for axis in mixed))
    own = (slots == jax.lax.axis_index(mixed)).reshape(-1, *(1,) * stacked.ndim)
    return jnp.where(own, stacked[None], 0.0)


def _take(total: jax.Array, leaf: LayeredLeaf, axes: tuple[str, ...]) -> jax.Array:
    """This device's layers out of the sum."""
    mixed = _mixed(leaf, axes)
    return total[jax.lax.axis_index(mixed)] if mixed else total[0]


def wide_zeros(param: jax.Array) -> jax.Array:
    """A moment to begin with: like the parameter, in float32 or wider."""
    return jnp.zeros_like(param, dtype=jnp.promote_types(param.dtype, jnp.float32))
