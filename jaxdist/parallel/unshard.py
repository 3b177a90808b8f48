"""Parameters that are gathered when a layer uses them, and whose gradients are reduced per layer.

Inside a `jax.shard_map` that is manual on the data axes, the classes of this module may replace a
model's parameters. Differentiation then returns this device's shard of the summed gradient, and in
stage 3 a layer's weights are whole only while the layer runs: a device never holds the whole
gradient of the model, or in stage 3 the whole model.
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

    Each use sends one all-gather for all parameters that are used together, and a reduce-scatter in
    the backward pass.

    Attributes:
      shard: this device's shard.
      dim: the split dim, counted from the end, and so the same in a slice of a stack of layers.
      spec: partition spec over automatic axes, with an entry for each dim, that of layers included.
      length: length of the split dim without the zeros that fill it up, or None if it divides.
      second: the shards of all devices at this device's place in their fast networks, along a new
        leading dim; gathered instead of `shard`. None gathers `shard` over all networks.
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
        """Return this device's shard of the gradient; called on the gradient of a parameter."""
        return self.shard

    @property
    def ahead(self) -> bool:
        """Whether a layer's parameters are gathered while the previous layer computes."""
        return self.wire.ahead


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["full", "shard"],
    meta_fields=["dim", "wire", "spec"],
)
@dataclass(frozen=True)
class Scattered(Deferred):
    """A parameter that is whole, but whose gradient is sharded (stage 2).

    Each use sends a reduce-scatter in the backward pass. In stage 3, a parameter that was gathered
    for a whole step is such a parameter too.

    Attributes:
      full: the whole parameter; differentiation gives zero as its gradient.
      shard: zeros of a shard's shape; their gradient is the shard of the parameter's gradient.
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
        """Return this device's shard of the gradient; called on the gradient of a parameter."""
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
    """Make a `ShardedParameter` (if `sharded`) or a `Scattered` parameter.

    Args:
      param: this device's shard (`sharded`), or the whole parameter.
      dim: the split dim of the parameter or of its gradient, counted from the front.
      spec: partition spec of the parameter over automatic axes.
      length, second: as for `ShardedParameter`.
      once: whether a shard is gathered at once, in one message, for all uses in a step.
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
    """The dim of a tensor that ZeRO splits; the attributes are those of `ShardedParameter`."""

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
    # The backward pass needs only the dtypes of its arguments, but a residual must be an array, so
    # scalars carry the dtypes. The gradient of `seconds` is zero: the shards get all of it.
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

    If `function` ran on whole arrays, XLA would gather them over those axes before sending.

    Args:
      out_specs: partition specs of the results; None means the same specs as for the arguments.
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
