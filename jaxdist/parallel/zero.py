"""ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): the split of the training state over replicas.

Without ZeRO all data-parallel replicas hold equal optimizer states, gradients and parameters. Stage
1 splits the optimizer state over the replicas. Stage 2 splits the gradients too, and stage 3 the
gradients and the parameters. This module chooses the split dim of each tensor from the shapes. The
rest of the framework only sees partition specs.

If the number of devices divides no dim of a tensor, a dim is padded with zeros. XLA requires even
shards of the arguments and results of a compiled program, but not of intermediate values. State is
therefore stored with the padding, and the padding is removed at the beginning of a step. The model,
the optimizer, norms and noise never see the padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist.errors import ConfigError
from jaxdist.mesh import ICI, entry_names
from jaxdist.optim.owners import Owner, of_params
from jaxdist.sharding import Dims, Layout
from jaxdist.sharding.dims import resting_names
from jaxdist.trees import flatten_with_names
from jaxdist.types import Params, PyTree, Shardings, Specs
from jaxdist.validity.zero import Stage, ZeroConfig

STAGES = range(4)
MOST_FILLED = 2
"""The largest factor by which padding may lengthen a dim. Zeros cost the same communication as
other values."""


@dataclass(frozen=True)
class ZeroSplit:
    """The split of the training state over replicas, parameter by parameter.

    Attributes:
      mesh: the mesh of the training state.
      config: the config, whose stage is 0 without ZeRO.
      axes: the mesh axes over which the state is split. The axis across the slowest network comes
        first.
      dims: the split dim of each parameter by name, or None for a parameter that is not split.
      resting: the names of the parameters that rest in the host's memory.
      once: whether stage 3 gathers all parameters once per step, and keeps them whole until the end
        of the step.
      uneven: the shapes, by name, of large parameters that are not split. The number of devices
        divides none of their dims, and none of these dims can be padded.
      padded: for each parameter whose split dim is padded, by name, the length of this dim without
        padding and with padding.
    """

    mesh: Mesh
    config: ZeroConfig
    axes: tuple[str, ...]
    dims: Mapping[str, int | None]
    resting: frozenset[str] = frozenset()
    once: bool = False
    uneven: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    padded: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def stage(self) -> Stage:
        """The stage of ZeRO."""
        return self.config.stage

    @property
    def offloaded(self) -> frozenset[str]:
        """The names of the parameters whose optimizer's state is in the host's memory.

        The state of parameters that are not split stays on the device, and is usually small.
        """
        names = frozenset(name for name, dim in self.dims.items() if dim is not None)
        return names if self.config.offload else frozenset()

    def dims_of(self, tree: PyTree) -> list[int | None]:
        """Return the split dim of each leaf of a tree like the parameters, in order."""
        return [self.dims[name] for name, _ in flatten_with_names(tree)]

    def lengths_of(self, tree: PyTree) -> list[int | None]:
        """Return the length of each leaf's split dim without padding, or None for other leaves."""
        names = [name for name, _ in flatten_with_names(tree)]
        return [self.padded[name][0] if name in self.padded else None for name in names]

    def map(self, function: Callable[[Any, int | None], Any], tree: PyTree) -> PyTree:
        """Map a function of (leaf, split dim or None) over a tree like the parameters."""
        leaves, structure = jax.tree.flatten(tree)
        found = [function(*pair) for pair in zip(leaves, self.dims_of(tree), strict=True)]
        return jax.tree.unflatten(structure, found)

    def specs(self, specs: Specs) -> PyTree:
        """Return the partition specs of the shards, from the specs without ZeRO."""
        return self.map(self._split, specs)

    def shardings(self, shardings: Shardings) -> PyTree:
        """Return the shardings of the shards, from the shardings without ZeRO."""
        specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs(specs))

    def filled(self, tree: PyTree) -> PyTree:
        """Pad the split dims of a tree like the parameters with zeros, where shards are uneven."""
        return jax.tree.map(self.fill_one, tree, of_params(tree))

    def cut(self, tree: PyTree) -> PyTree:
        """Remove the padding that `filled` adds to a tree like the parameters."""
        return jax.tree.map(self.cut_one, tree, of_params(tree))

    def fill_one(self, leaf: jax.Array, owner: Owner) -> jax.Array:
        """Pad a leaf, such as a moment, that is split like the parameter that owns it.

        The leaf is returned unchanged if the parameter is not padded.
        """
        dim = self._padded_dim(owner)
        if dim is None:
            return leaf
        length, filled = self.padded[owner.name]
        # `i == dim` is 1 for the padded dim and 0 for all other dims, which get no padding.
        more = [(0, (filled - length) * (i == dim)) for i in range(leaf.ndim)]
        return jnp.pad(leaf, more)

    def cut_one(self, leaf: jax.Array, owner: Owner) -> jax.Array:
        """Remove the padding that `fill_one` adds to a leaf."""
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
) -> ZeroSplit:
    """Choose the split dim of each parameter; at stage 0 no parameter is split.

    Args:
      config: the config of ZeRO.
      layout: the layout of the training state.
      params: the parameters, or their shapes.
      dims: the logical dims of each parameter, by name.
      parts: the number of equal parts into which a split dim is divided, a multiple of the number
        of devices, or None for the number of devices.
      by_layer: whether stage 1 splits stacked layers along the dim of layers if the parts are even,
        so that each device has whole layers. The other stages ignore this argument, because they
        send the gradients of each layer separately.

    Raises:
      ConfigError: no mesh axis splits the batch, or the scope is `ici` on a mesh with a single
        network, or a sharding rule already splits a parameter over the axes of the batch, or a
        pattern of `offload_parameters` matches no parameter or a parameter that is stored padded.
    """
    if config.stage == 0:
        return ZeroSplit(layout.mesh, config, (), dict.fromkeys(dims))
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
                f"zero: a sharding rule already splits parameter {name} "
                f"{tuple(leaf.shape)} as {spec} over {', '.join(axes)}; remove the rule "
                "(sharding.rules) or set parallel.zero.stage: 0"
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
    resting = resting_names(config.offload_parameters, chosen, padded if config.stage == 3 else {})
    return ZeroSplit(layout.mesh, config, axes, chosen, resting, uneven=uneven, padded=padded)


LANES, SUBLANES = 128, 8
"""The numbers of columns and of rows of a TPU's tile, for every dtype that ZeRO stores or gathers.
Two rows of bfloat16 share a sublane, but a tile of bfloat16 has 8 rows too (`T(8,128)(2,1)` in a
program)."""


def split_dim(shape: Sequence[int], dims: Dims, spec: PartitionSpec, parts: int) -> int | None:
    """Choose the dim of a tensor to split into `parts` equal parts, or return None.

    The candidates are the dims that ZeRO may split (`_free`) whose length is a multiple of `parts`.
    The result is None if there is no candidate. The order of preference follows from the memory
    layout of gathered tensors in XLA:TPU:

    1. Dims whose shards consist of whole tiles of the usual layout. For other dims, XLA may gather
       by an all-reduce of shards that are padded with zeros, which sends twice the bytes, or XLA
       may gather into another layout and then copy every gathered tensor.
    2. Dims whose shards consist of whole sublanes. XLA gathers along these dims into the transposed
       layout, which matmuls read without a copy.
    3. The longest dim, or the first of several longest dims.

    Args:
      shape: the shape of the tensor.
      dims: the logical dims of the tensor.
      spec: the partition spec that the tensor has without ZeRO.
      parts: the number of equal parts.

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
    """Choose the dim of a tensor to pad with zeros for a split into `parts` equal parts.

    The choice is the dim that padding lengthens by the smallest factor. If several dims have the
    smallest factor, the choice is the longest of these dims. The arguments are the same as for
    `split_dim`.

    Returns:
      The index of the dim, or None if padding would lengthen every dim that ZeRO may split by more
      than the factor `MOST_FILLED`.

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
    """Return the indices of the dims that ZeRO may split.

    The dim of stacked layers is excluded. Gradients and parameters are sent layer by layer, so each
    device must hold a part of every layer.

    A dim that another axis already splits is excluded too. That axis divides the dim into blocks,
    and a stored shard would be a contiguous part of one block. In a `jax.shard_map` that is manual
    on the data axes only, a shard is instead a contiguous part of the whole dim, and may span
    several blocks.
    """
    entries = [*spec, *(None,) * (len(dims) - len(spec))]
    return [i for i, dim in enumerate(dims) if dim != "layers" and not entry_names(entries[i])]


def _filled(length: int, parts: int) -> int:
    """Round `length` up to a multiple of `parts`."""
    return -(-length // parts) * parts


def _axes(config: ZeroConfig, layout: Layout) -> tuple[str, ...]:
    names, mesh = layout.batch_axes, dict(layout.mesh.shape)
    if not names:
        raise ConfigError(
            f"parallel.zero.stage {config.stage} splits the state over the axis of the batch, but "
            f"the mesh {mesh} has no such axis; set mesh.data, or parallel.zero.stage: 0"
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
