"""Parameters that are fetched where they are used, and whose gradients leave as soon as they are.

Inside a `jax.shard_map` that is manual on the data axes, a model's parameters may be replaced by
these. A layer's weights are then whole for as long as the layer runs, and what comes back from
differentiation is this device's shard of the summed gradient: a whole gradient of the model, or in
stage 3 a whole model, exists at no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxdist.collectives.axis import axis_size
from jaxdist.collectives.contract import Algorithm
from jaxdist.collectives.split import gather_leaves, scatter_leaves
from jaxdist.models.layers import Deferred
from jaxdist.types import Params, PyTree


@dataclass(frozen=True)
class Wire:
    """How the shards of parameters and gradients travel between the devices.

    Attributes:
      axes: manual mesh axes over which tensors are split.
      gather_dtype: of parameters on the wire, and where they are used; None is their own.
      reduce_dtype: of gradients on the wire, and of their sum; None is their own.
      ahead: whether a layer's parameters are gathered while the layer before computes.
    """

    axes: tuple[str, ...]
    algorithm: Algorithm
    gather_dtype: str | None = None
    reduce_dtype: str | None = None
    ahead: bool = False

    def gather(
        self,
        shards: Sequence[jax.Array],
        dims: Sequence[int],
        lengths: Sequence[int | None],
    ) -> list[jax.Array]:
        """The whole tensors, in the dtype of the wire; their dims cut to `lengths`."""
        carried = [shard.astype(self.gather_dtype or shard.dtype) for shard in shards]
        return gather_leaves(carried, dims, self.axes, lengths=lengths, algorithm=self.algorithm)

    def scatter(self, grads: Sequence[jax.Array], dims: Sequence[int]) -> list[jax.Array]:
        """This device's shards of the sums, in the dtype of the wire; zeros fill up the last."""
        carried = [grad.astype(self.reduce_dtype or grad.dtype) for grad in grads]
        return scatter_leaves(carried, dims, self.axes, algorithm=self.algorithm)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["shard"],
    meta_fields=["dim", "wire", "spec", "length"],
)
@dataclass(frozen=True)
class Sharded(Deferred):
    """A parameter of which this device keeps a shard (stage 3).

    Sent per use: an all-gather of all that are used together, and in the backward pass a
    reduce-scatter.

    Attributes:
      shard: this device's part.
      dim: which dim is split, counted from the end, so that a slice of stacked layers has it too.
      spec: how automatic axes split the parameter, an entry for each of its dims, layers included.
      length: of the dim, where zeros fill up its shards; None where it divides.
    """

    shard: jax.Array
    dim: int
    wire: Wire
    spec: PartitionSpec
    length: int | None = None

    @classmethod
    def whole(cls, several: Sequence[Sharded]) -> list[jax.Array]:
        """The parameters; their gradients are summed into the shards."""
        splits = tuple(Split(leaf.dim, leaf.spec, leaf.length) for leaf in several)
        return _gathered(several[0].wire, splits, [leaf.shard for leaf in several])

    def carried(self) -> jax.Array:
        """Of a gradient: this device's shard."""
        return self.shard

    @property
    def ahead(self) -> bool:
        """Whether the wire says so."""
        return self.wire.ahead


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["full", "shard"],
    meta_fields=["dim", "wire", "spec"],
)
@dataclass(frozen=True)
class Scattered(Deferred):
    """A parameter that is whole, and whose gradient is not (stage 2).

    Sent per use: a reduce-scatter in the backward pass.

    Attributes:
      full: the parameter; its own gradient is zero.
      shard: zeros of a shard's shape, which the gradient belongs to.
      dim, spec: as for `Sharded`.
    """

    full: jax.Array
    shard: jax.Array
    dim: int
    wire: Wire
    spec: PartitionSpec

    @classmethod
    def whole(cls, several: Sequence[Scattered]) -> list[jax.Array]:
        """The parameters; their gradients are summed into the shards."""
        splits = tuple(Split(leaf.dim, leaf.spec) for leaf in several)
        fulls, shards = [leaf.full for leaf in several], [leaf.shard for leaf in several]
        return _itself(several[0].wire, splits, fulls, shards)

    def carried(self) -> jax.Array:
        """Of a gradient: this device's shard."""
        return self.shard


def defer(
    param: jax.Array,
    dim: int,
    wire: Wire,
    spec: PartitionSpec,
    *,
    sharded: bool,
    length: int | None = None,
) -> PyTree:
    """A parameter that is fetched where it is used.

    Args:
      param: this device's shard (`sharded`), or the whole.
      dim: the dim that is split, or whose gradient is, counted from the front.
      spec: how automatic axes split it.
      length: of the dim, where zeros fill up its shards.
    """
    full = PartitionSpec(*spec, *(None,) * (param.ndim - len(spec)))
    if sharded:
        return Sharded(param, dim - param.ndim, wire, full, length)
    shape = [*param.shape]
    shape[dim] = -(-shape[dim] // axis_size(wire.axes))
    return Scattered(param, jnp.zeros(shape, param.dtype), dim - param.ndim, wire, full)


@dataclass(frozen=True)
class Split:
    """Which dim of a tensor ZeRO splits, counted from the end; the rest as in `Sharded`."""

    dim: int
    spec: PartitionSpec
    length: int | None = None


Splits = tuple[Split, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(wire: Wire, splits: Splits, shards: list[jax.Array]) -> list[jax.Array]:
    def gather(blocks: list[jax.Array]) -> list[jax.Array]:
        return wire.gather(blocks, _dims(splits, blocks), [split.length for split in splits])

    return on_blocks(gather, [split.spec for split in splits])(shards)


def _gathered_forward(
    wire: Wire, splits: Splits, shards: list[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    return _gathered(wire, splits, shards), [jnp.zeros((), shard.dtype) for shard in shards]


def _gathered_backward(
    wire: Wire, splits: Splits, like: list[jax.Array], cotangents: list[jax.Array]
) -> PyTree:
    summed = _scattered(wire, splits, cotangents)
    return ([s.astype(x.dtype) for s, x in zip(summed, like, strict=True)],)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def _scattered(wire: Wire, splits: Splits, grads: list[jax.Array]) -> list[jax.Array]:
    def scatter(blocks: list[jax.Array]) -> list[jax.Array]:
        return wire.scatter(blocks, _dims(splits, blocks))

    return on_blocks(scatter, [split.spec for split in splits])(grads)


def _dims(splits: Splits, tensors: list[jax.Array]) -> list[int]:
    return [x.ndim + split.dim for x, split in zip(tensors, splits, strict=True)]


def on_blocks(
    function: Callable[[list[jax.Array]], list[jax.Array]], specs: Sequence[PartitionSpec]
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """`function` of each device's blocks of arrays whose last dims automatic axes split by `specs`.

    On the whole arrays XLA would gather what those axes split before it sends anything.
    """

    def run(arrays: list[jax.Array]) -> list[jax.Array]:
        mesh = jax.sharding.get_abstract_mesh()
        if all(mesh.shape[axis] == 1 for axis in mesh.auto_axes):
            return function(arrays)
        blocks = [
            PartitionSpec(*spec[len(spec) - x.ndim :]) if len(spec) > x.ndim else spec
            for spec, x in zip(specs, arrays, strict=True)
        ]
        return jax.shard_map(
            function,
            axis_names={*mesh.auto_axes},
            in_specs=(blocks,),
            out_specs=blocks,
            check_vma=False,
        )(arrays)

    return run


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _itself(
    wire: Wire, splits: Splits, fulls: list[jax.Array], shards: list[jax.Array]
) -> list[jax.Array]:
    del wire, splits, shards
    return fulls


def _itself_forward(
    wire: Wire, splits: Splits, fulls: Any, shards: Params
) -> tuple[list[jax.Array], None]:
    del wire, splits, shards
    return fulls, None


def _itself_backward(wire: Wire, splits: Splits, _: None, cotangents: list[jax.Array]) -> PyTree:
    summed = _scattered(wire, splits, cotangents)
    zeros = [jnp.zeros_like(cotangent) for cotangent in cotangents]
    return zeros, [s.astype(c.dtype) for s, c in zip(summed, cotangents, strict=True)]


_itself.defvjp(_itself_forward, _itself_backward)
