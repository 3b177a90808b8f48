"""Deferred parameters for ZeRO 2 and 3, whose collectives run for each layer separately.

Inside a `jax.shard_map` that is manual on the data axes, the classes of this module may replace the
parameters of a model. Differentiation then returns this device's shard of the summed gradient, so
that a device never holds the gradients of the whole model. In stage 3 the parameters of a layer are
gathered when the layer runs, so that a device does not hold the parameters of the whole model. With
`once`, all parameters are instead gathered once per step, and each device holds all parameters.
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
    """A parameter of which each device holds a shard (stage 3).

    Parameters that are used together are gathered by one all-gather. In the backward pass the
    gradients of these parameters are summed by one reduce-scatter.

    Attributes:
      shard: this device's shard.
      dim: the negative index of the split dim, which counts from the last dim. A stack of layers
        and a slice of the stack therefore have the same `dim`.
      wire: the collectives.
      spec: the partition spec over auto axes, with an entry for each dim, including a dim of
        layers.
      length: the length of the split dim without padding, or None if the dim is not padded.
      second: a second copy from `ZeroMessages.hold`, which is gathered inside the fast network
        instead of `shard`, or None to gather `shard` over all axes.
    """

    shard: jax.Array
    dim: int
    wire: ZeroMessages
    spec: PartitionSpec
    length: int | None = None
    second: jax.Array | None = None

    @classmethod
    def whole(cls, several: Sequence[ShardedParameter]) -> list[jax.Array]:
        """Gather whole parameters, whose gradients become gradients of the shards."""
        splits = tuple(SplitDim(leaf.dim, leaf.spec, leaf.length) for leaf in several)
        seconds = [leaf.second for leaf in several if leaf.second is not None]
        return _gathered(several[0].wire, splits, [leaf.shard for leaf in several], seconds)

    def carried(self) -> jax.Array:
        """Return this device's shard of a gradient, where `self` is the gradient of a parameter."""
        return self.shard

    @property
    def ahead(self) -> bool:
        """Whether the parameters of a layer are gathered while the previous layer computes."""
        return self.wire.ahead


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["full", "shard"],
    meta_fields=["dim", "wire", "spec"],
)
@dataclass(frozen=True)
class Scattered(Deferred):
    """A parameter that is whole on each device, but whose gradient is sharded (stage 2).

    Each use runs a reduce-scatter in the backward pass. In stage 3, a parameter that is gathered
    once for a whole step is a `Scattered` parameter too.

    Attributes:
      full: the whole parameter. Differentiation returns zeros as its gradient.
      shard: zeros of a shard's shape. Differentiation returns this device's shard of the
        parameter's summed gradient as the gradient of these zeros.
      dim, wire, spec: the attributes of `ShardedParameter`.
    """

    full: jax.Array
    shard: jax.Array
    dim: int
    wire: ZeroMessages
    spec: PartitionSpec

    @classmethod
    def whole(cls, several: Sequence[Scattered]) -> list[jax.Array]:
        """Return whole parameters, whose gradients become gradients of the shards."""
        splits = tuple(SplitDim(leaf.dim, leaf.spec) for leaf in several)
        fulls, shards = [leaf.full for leaf in several], [leaf.shard for leaf in several]
        return _itself(several[0].wire, splits, fulls, shards)

    def carried(self) -> jax.Array:
        """Return this device's shard of a gradient, where `self` is the gradient of a parameter."""
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
    once: bool = False,
) -> PyTree:
    """Build a deferred parameter: a `ShardedParameter`, or a `Scattered` parameter.

    Args:
      param: this device's shard of the parameter if `sharded`, otherwise the whole parameter.
      dim: the index of the split dim of the parameter or of its gradient, not negative.
      wire: the collectives.
      spec: the partition spec of the parameter over auto axes.
      sharded: whether the parameter is sharded (stage 3). Otherwise only the parameter's gradient
        is sharded.
      length, second: the attributes of `ShardedParameter`.
      once: whether to gather the shard here, once for all uses in a step. The result is then a
        `Scattered` parameter.
    """
    full = PartitionSpec(*spec, *(None,) * (param.ndim - len(spec)))
    dtype = param.dtype
    if sharded and once:
        gather = partial(wire.gather, dims=[dim], lengths=[length])
        (param,) = on_blocks(gather, [full])([param])
    elif sharded:
        return ShardedParameter(param, dim - param.ndim, wire, full, length, second)
    shape = [*param.shape]
    shape[dim] = -(-shape[dim] // axis_size(wire.axes))
    return Scattered(param, jnp.zeros(shape, dtype), dim - param.ndim, wire, full)


@dataclass(frozen=True)
class SplitDim:
    """The dim of a tensor that ZeRO splits, with the attributes of `ShardedParameter`."""

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
    # The backward pass needs only the dtypes of the arguments, but a residual must be an array, so
    # scalars carry the dtypes. The second copies of the shards (`seconds`) get a gradient of
    # zero, because the gradient of the shards is already the whole gradient.
    like = [[jnp.zeros((), x.dtype) for x in part] for part in (shards, seconds)]
    return _gathered(wire, splits, shards, seconds), like


def _gathered_backward(
    wire: ZeroMessages, splits: Splits, saved: PyTree, cotangents: list[jax.Array]
) -> PyTree:
    shards, seconds = saved
    summed = _scattered(wire, splits, cotangents)
    count = axis_size(wire.slow)
    # `seconds` is empty if no second copy of the shards is stored.
    zeros = [jnp.zeros((count, *s.shape), x.dtype) for s, x in zip(summed, seconds, strict=False)]
    return [s.astype(x.dtype) for s, x in zip(summed, shards, strict=True)], zeros


_gathered.defvjp(_gathered_forward, _gathered_backward)


def _scattered(wire: ZeroMessages, splits: Splits, grads: list[jax.Array]) -> list[jax.Array]:
    specs = [_of_last(split.spec, grad.ndim) for split, grad in zip(splits, grads, strict=True)]
    return on_blocks(partial(wire.scatter, dims=_dims(splits, grads)), specs)(grads)


def _of_last(spec: PartitionSpec, dims: int) -> PartitionSpec:
    """Return the entries of a partition spec for the last `dims` dims."""
    # Inside a scan over layers, a parameter has no dim of layers, but its spec has an entry for it.
    return PartitionSpec(*spec[len(spec) - dims :]) if len(spec) > dims else spec


def _dims(splits: Splits, tensors: list[jax.Array]) -> list[int]:
    return [x.ndim + split.dim for x, split in zip(tensors, splits, strict=True)]


def on_blocks(
    function: Callable[[list[jax.Array]], list[jax.Array]],
    specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec] | None = None,
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Return a function that calls `function` on each device's blocks of arrays.

    A block is a device's part of an array that the auto axes of the mesh split. If `function` ran
    on whole arrays, XLA would gather the arrays over the auto axes before it sends them.

    Args:
      function: maps a list of blocks to a list of blocks; may call collectives over manual axes.
      specs: the partition specs of the arrays over the auto axes.
      out_specs: the partition specs of the results, or None if they are the same as `specs`.
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
) -> tuple[list[jax.Array], list[jax.Array]]:
    del wire, splits
    # Scalars carry the dtypes of the gradients, which `gather_dtype` does not change.
    return fulls, [jnp.zeros((), shard.dtype) for shard in shards]


def _itself_backward(
    wire: ZeroMessages, splits: Splits, like: list[jax.Array], cotangents: list[jax.Array]
) -> PyTree:
    summed = _scattered(wire, splits, cotangents)
    zeros = [jnp.zeros_like(cotangent) for cotangent in cotangents]
    return zeros, [s.astype(x.dtype) for s, x in zip(summed, like, strict=True)]


_itself.defvjp(_itself_forward, _itself_backward)
