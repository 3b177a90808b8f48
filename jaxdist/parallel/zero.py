"""ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): state split over data-parallel replicas.

Replicas hold equal optimizer states, gradients and parameters. Stage 1 splits the optimizer state
over the replicas, stage 2 also the gradients, stage 3 also the parameters. This module chooses the
split dim of each tensor, from shapes alone; the rest of the framework only sees partition specs.

If no dim of a tensor divides, a dim is filled up with zeros. Arguments and results of a compiled
program must divide over the devices, but intermediate values need not: state is stored with the
zeros, and cut to its own shape at the beginning of a step. Model, optimizer, norms and noise
therefore never see these zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pydantic import Field, field_validator

from jaxdist.compression import Adaptive, Cast, Codec, Quantize
from jaxdist.config.schema import Config
from jaxdist.errors import ConfigError
from jaxdist.mesh import ICI, axis_names, entry_names
from jaxdist.optim.owners import Owner, of_params
from jaxdist.sharding import Dims, Layout
from jaxdist.trees import flatten_with_names
from jaxdist.types import Params, PyTree, Shardings, Specs

STAGES = range(4)
# A Literal would accept true and 1.0 as 1, since pydantic compares its values by equality.
Stage = Annotated[int, Field(ge=0, le=3)]
MOST_FILLED = 2
"""The largest factor by which a dim may be filled up: zeros cost communication like other
values."""


GatherCodec = Annotated[Cast | Quantize | Adaptive, Field(discriminator="type")]


class ZeroConfig(Config):
    """The splitting of the training state over the devices that share the batch."""

    stage: Stage = 0
    """The stage of ZeRO: 0 replicates everything; 1 splits the optimizer state, 2 also gradients, 3
    also parameters."""
    scope: Literal["all", "ici"] = "all"
    """The devices over which a copy of the state is split: those of the whole data axis (all), or
    those of each fast network, which then has a copy of its own (ici)."""
    whole_below: Annotated[int, Field(ge=0)] = 2048
    """The number of elements below which a tensor is not split, because splitting would save little
    memory and cost a message."""
    gather_dtype: Literal["bfloat16"] | None = None
    """The dtype in which stage 3 gathers parameters for the model; null keeps their own dtype."""
    prefetch: bool = False
    """Whether stage 3 gathers a layer while the previous layer computes, and so holds one layer
    more."""
    gather_codec: GatherCodec | None = None
    """The codec of the messages in which stage 3 gathers parameters; each device keeps its exact
    shard."""
    secondary: bool = False
    """Whether stage 3 gathers shards across the slow network only once per step. Forward and
    backward pass then gather inside the fast network, from a second copy kept for the step."""

    @field_validator("gather_codec")
    @classmethod
    def _same_each_time(cls, codec: GatherCodec | None) -> GatherCodec | None:
        if codec is not None and codec.unbiased:
            raise ValueError(
                "rounding stochastic: both passes must see the same parameters; use nearest, "
                "which is sound since each device keeps its shard exactly"
            )
        return codec


@dataclass(frozen=True)
class ZeroSplit:
    """The splitting of each parameter's state.

    Attributes:
      axes: mesh axes over which the state is split, slowest first.
      dims: the split dim of each parameter, by name, or None for a parameter that stays whole.
      gather_dtype: dtype of gathered parameters; None keeps their own dtype.
      prefetch: whether a layer is gathered while the previous layer computes.
      gather_codec: codec of the parameters in gathers; None sends them uncompressed.
      secondary: whether shards are gathered across the slow network once a step.
      once: whether stage 3 gathers parameters once a step, and keeps them whole until its end.
      uneven: shapes, by name, of large parameters that stay whole, because no dim divides and none
        can be filled up with zeros.
      padded: for each parameter whose split dim does not divide, by name: the dim's own length, and
        its length with zeros at the end.
    """

    mesh: Mesh
    stage: Stage
    axes: tuple[str, ...]
    dims: Mapping[str, int | None]
    gather_dtype: str | None = None
    prefetch: bool = False
    gather_codec: Codec | None = None
    secondary: bool = False
    once: bool = False
    uneven: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    padded: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def dims_of(self, tree: PyTree) -> list[int | None]:
        """Return the split dim of each leaf of a tree like the parameters, in order."""
        return [self.dims[name] for name, _ in flatten_with_names(tree)]

    def lengths_of(self, tree: PyTree) -> list[int | None]:
        """Return the length of each leaf's split dim without zeros, or None if the dim divides."""
        names = [name for name, _ in flatten_with_names(tree)]
        return [self.padded[name][0] if name in self.padded else None for name in names]

    def map(self, function: Callable[[Any, int | None], Any], tree: PyTree) -> PyTree:
        """Map `function` of (leaf, its split dim) over a tree like the parameters."""
        leaves, structure = jax.tree.flatten(tree)
        found = [function(*pair) for pair in zip(leaves, self.dims_of(tree), strict=True)]
        return jax.tree.unflatten(structure, found)

    def specs(self, specs: Specs) -> PyTree:
        """Add `axes` to each parameter's partition spec, at the split dim."""
        return self.map(self._split, specs)

    def shardings(self, shardings: Shardings) -> PyTree:
        """Add `axes` to each parameter's sharding, at the split dim."""

        def split(sharding: NamedSharding, dim: int | None) -> NamedSharding:
            return NamedSharding(self.mesh, self._split(sharding.spec, dim))

        return self.map(split, shardings)

    def filled(self, tree: PyTree) -> PyTree:
        """Fill up the split dims that do not divide with zeros, in a tree like the parameters."""
        return jax.tree.map(self.fill_one, tree, of_params(tree))

    def cut(self, tree: PyTree) -> PyTree:
        """Cut off the zeros of `filled`, in a tree like the parameters."""
        return jax.tree.map(self.cut_one, tree, of_params(tree))

    def fill_one(self, leaf: jax.Array, owner: Owner) -> jax.Array:
        """Fill up a leaf, such as a moment, that shares the split dim of the parameter `owner`."""
        dim = self._padded_dim(owner)
        if dim is None:
            return leaf
        length, filled = self.padded[owner.name]
        # The comparison counts as 0 or 1, so only this dim is filled up.
        more = [(0, (filled - length) * (i == dim)) for i in range(leaf.ndim)]
        return jnp.pad(leaf, more)

    def cut_one(self, leaf: jax.Array, owner: Owner) -> jax.Array:
        """Cut off the zeros that `fill_one` appends."""
        dim = self._padded_dim(owner)
        if dim is None:
            return leaf
        return jax.lax.slice_in_dim(leaf, 0, self.padded[owner.name][0], axis=dim)

    def _padded_dim(self, owner: Owner) -> int | None:
        return owner.place_of(self.dims[owner.name]) if owner.name in self.padded else None

    def _split(self, spec: PartitionSpec, dim: int | None) -> PartitionSpec:
        if dim is None:
            return spec
        entries = [*spec, *(None,) * (dim + 1 - len(spec))]
        assert not entry_names(entries[dim]), "see _free"
        entries[dim] = self.axes[0] if len(self.axes) == 1 else self.axes
        return PartitionSpec(*entries)


def plan_zero(
    config: ZeroConfig,
    layout: Layout,
    params: Params,
    dims: Mapping[str, Dims],
    *,
    parts: int | None = None,
    by_layer: bool = False,
) -> ZeroSplit | None:
    """Choose the dim along which the config's stage splits each parameter, or None for stage 0.

    Args:
      params: the parameters, or their shapes.
      dims: logical dims of each parameter, by name.
      parts: number of parts that a split dim must divide into, a multiple of the number of devices;
        None means the number of devices.
      by_layer: whether stage 1 splits stacked layers where they divide, so that each device has
        whole layers; other stages ignore it, because they send each layer's gradients separately.

    Raises:
      ConfigError: the mesh has no data axis, scope is ici without two networks, or a rule already
        splits a parameter over the data axis.
    """
    if config.stage == 0:
        return None
    axes = _axes(config, layout)
    parts = parts or math.prod(layout.mesh.shape[axis] for axis in axes)
    chosen: dict[str, int | None] = {}
    uneven: dict[str, tuple[int, ...]] = {}
    padded: dict[str, tuple[int, int]] = {}
    for name, leaf in flatten_with_names(params):
        spec = layout.spec(dims[name])
        taken = {axis for entry in spec for axis in entry_names(entry)}
        if taken & set(axes):
            raise ConfigError(
                f"zero: a sharding rule already splits parameter {name} {tuple(leaf.shape)} as "
                f"{spec} over {', '.join(axes)}; remove the rule (sharding.rules) or set "
                "parallel.zero.stage: 0"
            )
        chosen[name] = None
        if math.prod(leaf.shape) < config.whole_below:
            continue
        layered = by_layer and config.stage == 1 and dims[name][:1] == ("layers",)
        if layered and leaf.shape[0] % parts == 0 and not any(map(entry_names, spec[:1])):
            chosen[name] = 0
            continue
        dim = split_dim(leaf.shape, dims[name], spec, parts)
        if dim is None:
            dim = padded_dim(leaf.shape, dims[name], spec, parts)
            if dim is None:
                uneven[name] = tuple(leaf.shape)
            else:
                padded[name] = leaf.shape[dim], _filled(leaf.shape[dim], parts)
        chosen[name] = dim
    return ZeroSplit(
        layout.mesh,
        config.stage,
        axes,
        chosen,
        config.gather_dtype,
        config.prefetch,
        config.gather_codec,
        config.secondary,
        uneven=uneven,
        padded=padded,
    )


LANES, SUBLANES = 128, 8
"""The columns and rows of a TPU's tile, for every dtype that ZeRO stores or gathers. Two rows of
bfloat16 share a sublane, but a tile of bfloat16 has 8 rows too (`T(8,128)(2,1)` in a program)."""


def split_dim(shape: Sequence[int], dims: Dims, spec: PartitionSpec, parts: int) -> int | None:
    """Choose the dim to split into `parts`, among the free dims, or return None if no dim divides.

    The order of preference follows from how XLA:TPU lays out a gathered tensor:

    1. dims whose shards are whole tiles of the usual layout: XLA gathers other dims by an
       all-reduce of zeros with a shard in them, which sends twice the bytes, or into another
       layout, from which every gathered tensor is copied;
    2. dims whose shards are whole sublanes: XLA gathers them in the transposed layout, which
       matmuls read without a copy;
    3. the longest dim, and the first of several.

    >>> split_dim((4, 16, 48), ("layers", "embed", "mlp"), PartitionSpec(None, None, "tensor"), 8)
    1
    >>> split_dim((8192, 28672), ("embed", "mlp"), PartitionSpec(), 64)  # 28672 / 64 is 3.5 x 128
    0
    >>> split_dim((28672, 8192), ("mlp", "embed"), PartitionSpec(), 1024)  # 28 rows or 8 columns
    1
    """
    fitting = [dim for dim in _free(dims, spec) if shape[dim] and shape[dim] % parts == 0]
    tiles = {-1: LANES, -2: SUBLANES}

    def rank(dim: int) -> tuple[bool, bool, int, int]:
        shard, tile = shape[dim] // parts, tiles.get(dim - len(shape), 1)
        return shard % tile == 0, shard % SUBLANES == 0, shape[dim], -dim

    return max(fitting, key=rank, default=None)


def padded_dim(shape: Sequence[int], dims: Dims, spec: PartitionSpec, parts: int) -> int | None:
    """Choose the free dim to fill up with zeros: the dim that grows least, then the longest.

    The result is None if every free dim would grow to more than `MOST_FILLED` times its length.

    >>> padded_dim((65, 33, 3), (None, "embed", "heads"), PartitionSpec(None, None, "tensor"), 8)
    0
    """

    def waste(dim: int) -> tuple[float, int]:
        return _filled(shape[dim], parts) / shape[dim], -shape[dim]

    fitting = [
        dim
        for dim in _free(dims, spec)
        if 0 < _filled(shape[dim], parts) <= MOST_FILLED * shape[dim]
    ]
    return min(fitting, key=waste, default=None)


def _free(dims: Dims, spec: PartitionSpec) -> list[int]:
    """Return the dims that ZeRO may split.

    The dim of stacked layers is excluded: gradients and parameters are sent layer by layer, so each
    device must hold a part of every layer. A dim that another axis splits is excluded too: stored
    shards would be contiguous inside each block of that axis, but the shards of a `jax.shard_map`
    that is manual on the data axes only are spread across all blocks.
    """
    entries = [*spec, *(None,) * (len(dims) - len(spec))]
    return [i for i, dim in enumerate(dims) if dim != "layers" and not entry_names(entries[i])]


def _filled(length: int, parts: int) -> int:
    """Round `length` up to a multiple of `parts`."""
    return -(-length // parts) * parts


def _axes(config: ZeroConfig, layout: Layout) -> tuple[str, ...]:
    axis = layout.axis_of("batch")
    names = axis_names(layout.mesh, axis) if axis else ()
    mesh = dict(layout.mesh.shape)
    if not names:
        raise ConfigError(
            f"parallel.zero.stage {config.stage} splits the training state over the axis of the "
            f"batch, but the mesh {mesh} has none; set mesh.data, or parallel.zero.stage: 0"
        )
    if config.scope == "all":
        return names
    fast = tuple(name for name in names if name.endswith(ICI))
    if not fast:
        raise ConfigError(
            "parallel.zero.scope: ici needs a data axis over two networks, but the mesh is "
            f"{mesh}; set mesh.data: {{dcn: D, ici: I}}, or parallel.zero.scope: all"
        )
    return fast
