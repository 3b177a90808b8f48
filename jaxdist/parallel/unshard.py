"""Parameters that are gathered where they are used, and whose gradients are reduced at once.

Inside a `jax.shard_map` that is manual on the data axes, a model's parameters may be replaced by
these objects. A layer's weights are then whole only while the layer runs, and differentiation
returns this device's shard of the summed gradient: a whole gradient of the model, or in stage 3 a
whole model, never exists.
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
from jaxdist.models.layers import Deferred
from jaxdist.parallel.wire import ZeroMessages
from jaxdist.types import Params, PyTree


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["shard", "second"],
    meta_fields=["dim", "wire", "spec", "length"],
)
@dataclass(frozen=True)
class ShardedParameter(Deferred):
    """A parameter of which this device keeps a shard (stage 3).

    Each use sends an all-gather of all parameters that are used together, and in the backward pass
    a reduce-scatter.

    Attributes:
      shard: this device's part.
      dim: the split dim, counted from the end, so that a slice of stacked layers has it too.
      spec: how automatic axes split the parameter, an entry for each of its dims, layers included.
      length: length of the dim, where zeros fill up its shards; None where it divides.
      second: the shards of all devices at this device's place in their fast networks, along a dim
        before the shard's own; gathered instead of `shard`. None gathers over all networks.
    """

    shard: jax.Array
    dim: int
    wire: ZeroMessages
    spec: PartitionSpec
    length: int | None = None
    second: jax.Array | None = None

    @classmethod
    def whole(cls, several: Sequence[ShardedParameter]) -> list[jax.Array]:
        """Return the parameters; their gradients are summed into the shards."""
        splits = tuple(SplitDim(leaf.dim, leaf.spec, leaf.length) for leaf in several)
        seconds = [leaf.second for leaf in several if leaf.second is not None]
        return _gathered(several[0].wire, splits, [leaf.shard for leaf in several], seconds)

    def carried(self) -> jax.Array:
        """Return this device's shard of the gradient, if this is a gradient."""
        return self.shard

    @property
    def ahead(self) -> bool:
        """Whether the wire gathers the next layer ahead."""
        return self.wire.ahead


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["full", "shard"],
    meta_fields=["dim", "wire", "spec"],
)
@dataclass(frozen=True)
class Scattered(Deferred):
    """A parameter that is whole, but whose gradient is sharded (stage 2).

    Each use sends a reduce-scatter in the backward pass.

    Attributes:
      full: the parameter; its own gradient is zero.
      shard: zeros of a shard's shape, whose gradient is that of the parameter.
      dim, spec: as for `ShardedParameter`.
    """

    full: jax.Array
    shard: jax.Array
    dim: int
    wire: ZeroMessages
    spec: PartitionSpec

    @classmethod
    def whole(cls, several: Sequence[Scattered]) -> list[jax.Array]:
        """Return the parameters; their gradients are summed into the shards."""
        splits = tuple(SplitDim(leaf.dim, leaf.spec) for leaf in several)
        fulls, shards = [leaf.full for leaf in several], [leaf.shard for leaf in several]
        return _itself(several[0].wire, splits, fulls, shards)

    def carried(self) -> jax.Array:
        """Return this device's shard of the gradient, if this is a gradient."""
        return self.shard


def defer(
    param: jax.Array,
    dim: int,
    wire: ZeroMessages,
    spec: PartitionSpec,
    *,
    sharded: bool,
    length: int | None = None,
    second: jax.Array | None = None,
) -> PyTree:
    """Make a parameter that is gathered where it is used.

    Args:
      param: this device's shard (`sharded`), or the whole parameter.
      dim: the split dim of the parameter or of its gradient, counted from the front.
      spec: how automatic axes split it.
      length: length of the dim, where zeros fill up its shards.
      second: see `ShardedParameter`.
    """
    full = PartitionSpec(*spec, *(None,) * (param.ndim - len(spec)))
    if sharded:
        return ShardedParameter(param, dim - param.ndim, wire, full, length, second)
    shape = [*param.shape]
    shape[dim] = -(-shape[dim] // axis_size(wire.axes))
    return Scattered(param, jnp.zeros(shape, param.dtype), dim - param.ndim, wire, full)


@dataclass(frozen=True)
class SplitDim:
    """The dim of a tensor that ZeRO splits, from the end; the rest as in `ShardedParameter`."""

    dim: int
    spec: PartitionSpec
    length: int | None = None


Splits = tuple[SplitDim, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(
    wire: ZeroMessages, splits: Splits, shards: list[jax.Array], seconds: list[jax.Array]
) -> list[jax.Array]:
    dims, lengths = _dims(splits, shards), [split.length for split in splits]
    specs = [_of_last(split.spec, shard.ndim) for split, shard in zip(splits, shards, strict=True)]
    if seconds:
        gather = partial(wire.gather_seconds, dims=dims, lengths=lengths)
        return on_blocks(gather, [PartitionSpec(None, *spec) for spec in specs], specs)(seconds)
    return on_blocks(partial(wire.gather, dims=dims, lengths=lengths), specs)(shards)


def _gathered_forward(
    wire: ZeroMessages, splits: Splits, shards: list[jax.Array], seconds: list[jax.Array]
) -> tuple[list[jax.Array], PyTree]:
    # The gradient of `seconds` is zero: the whole gradient belongs to the shards.
    # The backward pass needs only dtypes, and a residual must be an array: scalars hold no memory.
    like = [[jnp.zeros((), x.dtype) for x in part] for part in (shards, seconds)]
    return _gathered(wire, splits, shards, seconds), like


def _gathered_backward(
    wire: ZeroMessages, splits: Splits, saved: PyTree, cotangents: list[jax.Array]
) -> PyTree:
    shards, seconds = saved
    summed = _scattered(wire, splits, cotangents)
    count = axis_size(wire.slow)
    # `seconds` is empty where no second shards are stored.
    zeros = [jnp.zeros((count, *s.shape), x.dtype) for s, x in zip(summed, seconds, strict=False)]
    return [s.astype(x.dtype) for s, x in zip(summed, shards, strict=True)], zeros


_gathered.defvjp(_gathered_forward, _gathered_backward)


def _scattered(wire: ZeroMessages, splits: Splits, grads: list[jax.Array]) -> list[jax.Array]:
    specs = [_of_last(split.spec, grad.ndim) for split, grad in zip(splits, grads, strict=True)]
    return on_blocks(partial(wire.scatter, dims=_dims(splits, grads)), specs)(grads)


def _of_last(spec: PartitionSpec, dims: int) -> PartitionSpec:
    """Return the entries of the last `dims` dims."""
    # Inside a scan over layers, a parameter has lost its first dim, but its spec has not.
    return PartitionSpec(*spec[len(spec) - dims :]) if len(spec) > dims else spec


def _dims(splits: Splits, tensors: list[jax.Array]) -> list[int]:
    return [x.ndim + split.dim for x, split in zip(tensors, splits, strict=True)]


def on_blocks(
    function: Callable[[list[jax.Array]], list[jax.Array]],
    specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec] | None = None,
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Map `function` over each device's blocks of arrays that automatic axes split by `specs`.

    On whole arrays, XLA would gather over those axes before it sends anything.

    Args:
      out_specs: partition specs of the results; None is those of the arguments.
    """

    def run(arrays: list[jax.Array]) -> list[jax.Array]:
        mesh = jax.sharding.get_abstract_mesh()
        if all(mesh.shape[axis] == 1 for axis in mesh.auto_axes):
            return function(arrays)
        return jax.shard_map(
            function,
            axis_names={*mesh.auto_axes},
            in_specs=(list(specs),),
            out_specs=list(out_specs or specs),
            check_vma=False,
        )(arrays)

    return run


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _itself(
    wire: ZeroMessages, splits: Splits, fulls: list[jax.Array], shards: list[jax.Array]
) -> list[jax.Array]:
    del wire, splits, shards
    return fulls


def _itself_forward(
    wire: ZeroMessages, splits: Splits, fulls: Any, shards: Params
) -> tuple[list[jax.Array], None]:
    del wire, splits, shards
    return fulls, None


def _itself_backward(
    wire: ZeroMessages, splits: Splits, _: None, cotangents: list[jax.Array]
) -> PyTree:
    summed = _scattered(wire, splits, cotangents)
    zeros = [jnp.zeros_like(cotangent) for cotangent in cotangents]
    return zeros, [s.astype(c.dtype) for s, c in zip(summed, cotangents, strict=True)]


_itself.defvjp(_itself_forward, _itself_backward)
