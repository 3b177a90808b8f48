"""The layers in a leaf of the parameters, and norms of layers that are split over devices.

A leaf may hold many layers, stacked for a scan over layers, and it may be a device's shard of a
larger array. This module derives both facts from logical dims and partition specs while the program
is traced, so that the update rules need no case distinctions.
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
from jaxdist.trees import flatten_with_names, map_with_names
from jaxdist.types import Dims, Leaf, Params, PyTree, Specs

FOLD = 16
"""The number of adjacent elements that a reduction adds up first. XLA:CPU unrolls and vectorizes at
most this number of additions."""

StepCount: TypeAlias = Any
"""An int32 scalar. (A more exact type would clash with the method `count` of named tuples.)"""
Squares = tuple[jax.Array, ...]
"""The sums of squares of several tensors of one leaf, in float32; a summed dim has length 1."""


def layer_dims(
    params: Params, dims: Mapping[str, Dims], names: Sequence[str] = ("layers",)
) -> PyTree:
    """Return the logical dims of each parameter, with None for each dim that is not in `names`.

    Args:
      dims: the logical dims of each parameter, by '/'-joined name.
      names: the names of the dims along which each index has a separate norm: "layers" separates
        stacked layers, and "heads" or "expert" separates heads or experts too.

    Raises:
      ConfigError: a name is not a dim of any parameter; "layers" is always accepted, since not all
        models are stacked.

    >>> layer_dims({"w": jnp.ones((4, 2, 3))}, {"w": ("layers", "embed", "mlp")})
    {'w': ('layers', None, None)}
    """
    known = sorted({dim for found in dims.values() for dim in found if dim})
    for name in names:
        if name not in known and name != "layers":
            raise ConfigError(
                f"layer_dims: no parameter has a dim {name!r}: {did_you_mean(name, known)}"
            )
    return map_with_names(
        lambda name, _: tuple(dim if dim in names else None for dim in dims[name]), params
    )


@dataclass(frozen=True)
class LayeredLeaf:
    """A leaf of the parameters, with its layers and its shards.

    Attributes:
      name: the '/'-joined name of the parameter.
      ndim: the number of dims.
      kept: the positions of the dims along which each index is a separate layer.
      split: for each dim, the manual mesh axes that split the dim.
    """

    name: str
    ndim: int
    kept: tuple[int, ...]
    split: tuple[tuple[str, ...], ...]

    @property
    def summed(self) -> tuple[int, ...]:
        """The positions of the dims over which a norm is summed: the dims not in `kept`."""
        return tuple(i for i in range(self.ndim) if i not in self.kept)

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """The manual axes over which the shards of a layer are spread."""
        return tuple(axis for i in self.summed for axis in self.split[i])

    @property
    def kept_axes(self) -> tuple[str, ...]:
        """The manual axes along which devices hold different layers."""
        return tuple(axis for i in self.kept for axis in self.split[i])

    def squares(self, *tensors: jax.Array) -> Squares:
        """Return each tensor's sum of squares in each layer of this device's shard, in float32."""
        return tuple(jnp.sum(_square(x), self.summed, keepdims=True) for x in tensors)

    def squares_in_one_pass(self, *tensors: jax.Array) -> Squares:
        """Return the result of `squares`, in one pass over the inputs that the tensors share."""
        folded = self._folded([_square(x) for x in tensors])
        return tuple(jnp.sum(x, self.summed, keepdims=True) for x in folded)

    def _folded(self, tensors: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Add up at most `FOLD` adjacent elements along a summed dim, in a pass over all tensors.

        XLA would compute two full sums either in two passes over the inputs, or in one pass as two
        chains, in which each addition waits for the previous addition. Here the elements of a row
        are independent of each other, so that their additions are vectorized.
        """
        rows = [i for i in self.summed if i != self.ndim - 1]
        shape = tensors[0].shape if tensors else ()
        factors = [(_divisor(shape[i]), i) for i in rows]
        factor, dim = max(factors, default=(1, 0))
        # XLA may have split this dim along an automatic mesh axis. If the reshape cut it at other
        # positions, XLA would gather the shards.
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
    """Return the largest divisor of `size` that is at most `FOLD`."""
    return max(k for k in range(1, FOLD + 1) if size % k == 0)


def _automatic(x: jax.Array) -> bool:
    """Return whether XLA may have split the array along an automatic mesh axis."""
    mesh = jax.typeof(x).sharding.mesh
    return any(mesh.shape[axis] > 1 for axis in (*mesh.auto_axes, *mesh.explicit_axes))


def describe_layers(
    params: Params, layer_dims: PyTree = None, specs: Specs = None
) -> list[LayeredLeaf]:
    """Return a description of the layers in each leaf of `params`, in the order of the leaves.

    Args:
      layer_dims: a tree like the parameters, with a list for each parameter. The list has the name
        of each dim along which every index has a separate norm, and None for each dim over which a
        norm is summed: `["layers", None, None]` for a stack of matrices. The function `layer_dims`
        builds such a tree. A parameter with None instead of a list has a single norm. If the tree
        is None, every parameter has a single norm.
      specs: a tree of partition specs, as passed to `jax.shard_map`; it has no effect outside of
        `jax.shard_map`. None means that no leaf is split.

    Raises:
      ConfigError: a list does not have an entry for each dim; the mesh does not have an axis; a
        tree has another structure than `params`.
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
            f"{name} must be a tree with the structure of the parameters: {error}"
        ) from error


def _positions(name: str, x: jax.Array, dims: Sequence[str | None] | None) -> tuple[int, ...]:
    if dims is None:
        return ()
    shown = f"layer_dims of parameter {name or 'params'} {x.shape}: {dims!r} names"
    example = ("layers", *(None,) * (x.ndim - 1))
    remedy = (
        "name each dim along which every index has its own norm, and use None for other dims, "
        f"such as {example}"
    )
    if not isinstance(dims, tuple | list) or not all(d is None or isinstance(d, str) for d in dims):
        raise ConfigError(f"{shown} no dims; {remedy}")
    if len(dims) != x.ndim:
        raise ConfigError(f"{shown} {len(dims)} dims, but the parameter has {x.ndim}; {remedy}")
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
                f"spec of parameter {name or 'params'} {x.shape}: {spec} names "
                f"{axis!r}, which is not an axis of the mesh: "
                f"{did_you_mean(axis, map(str, mesh.axis_names))}"
            )
    # Only manual axes count: along an automatic axis the program sees whole arrays, over which XLA
    # completes every sum.
    split = [tuple(axis for axis in entry if axis in manual) for entry in entries]
    return (*split, *((),) * (x.ndim - len(split)))


def single_norm(leaf: LayeredLeaf) -> LayeredLeaf:
    """Return the leaf as a single layer, with one norm over all elements of the leaf."""
    return replace(leaf, kept=())


def add_shards(squares: Sequence[Squares], leaves: Sequence[LayeredLeaf]) -> list[Squares]:
    """Add up the sums of squares over all shards of each layer, by one all-reduce for all leaves.

    The all-reduce sends only the sums of split leaves, a few float32 for each layer. The sums of
    other leaves are returned unchanged.
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
    """Return the axes of the all-reduce along which devices hold different layers of a leaf."""
    return tuple(axis for axis in leaf.kept_axes if axis in axes)


def _place(stacked: jax.Array, leaf: LayeredLeaf, axes: tuple[str, ...]) -> jax.Array:
    """Return this device's term of the all-reduce, in which each layer has a separate entry.

    The shape changes from `[tensors, ...]` to `[devices along mixed axes, tensors, ...]`.
    """
    # Along an axis that splits no dim of this leaf, devices hold replicas. A sum over the axis
    # would count every replica, so only the first device contributes.
    for axis in axes:
        if axis not in leaf.summed_axes and axis not in leaf.kept_axes:
            stacked = jnp.where(jax.lax.axis_index(axis) == 0, stacked, 0.0)
    mixed = _mixed(leaf, axes)
    if not mixed:
        return stacked[None]
    # The all-reduce sums over all axes at once. Devices with different layers therefore need
    # separate entries, because the sums of different layers would otherwise be added together.
    slots = jnp.arange(math.prod(jax.lax.axis_size(axis) for axis in mixed))
    own = (slots == jax.lax.axis_index(mixed)).reshape(-1, *(1,) * stacked.ndim)
    return jnp.where(own, stacked[None], 0.0)


def _take(total: jax.Array, leaf: LayeredLeaf, axes: tuple[str, ...]) -> jax.Array:
    """Extract this device's layers from the result of the all-reduce."""
    mixed = _mixed(leaf, axes)
    return total[jax.lax.axis_index(mixed)] if mixed else total[0]


def wide_zeros(param: jax.Array) -> jax.Array:
    """Return the initial value of a moment: zeros like the parameter, in float32 or wider."""
    return jnp.zeros_like(param, dtype=jnp.promote_types(param.dtype, jnp.float32))
