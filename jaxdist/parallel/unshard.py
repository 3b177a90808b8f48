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
from jaxdist.types import PyTree


@dataclass(frozen=True)
class SplitDim:
    """The dim of a parameter that ZeRO splits.

    Attributes:
      dim: the negative index of the dim, which counts from the last dim. A stack of layers and a
        slice of the stack therefore have the same `dim`.
      spec: the partition spec of the parameter over auto axes, with an entry for each dim,
        including a dim of layers.
      length: the length of the dim without padding, or None if the dim is not padded.
    """

    dim: int
    spec: PartitionSpec
    length: int | None = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["full", "shard", "second"],
    meta_fields=["split", "wire"],
)
@dataclass(frozen=True)
class ShardedParameter(Deferred):
    """A parameter of which each device holds a shard (stage 3), or whose gradient is sharded.

    Sharded parameters that are used together are gathered by one all-gather. In the backward pass
    the gradients of parameters that are used together are summed by one reduce-scatter. In stage 2,
    and for parameters that are gathered once per step, devices hold whole parameters.

    Attributes:
      shard: this device's shard, or zeros in its shape if devices hold the whole parameter.
        Differentiation returns the shard of the summed gradient as the gradient of `shard`.
      split: the split dim.
      wire: the collectives.
      full: the whole parameter, with a gradient of zeros, if devices hold it; otherwise None.
      second: a second copy from `ZeroMessages.hold`, which is gathered inside the fast network
        instead of `shard`, or None to gather `shard` over all axes.
    """

    shard: jax.Array
    split: SplitDim
    wire: ZeroMessages
    full: jax.Array | None = None
    second: jax.Array | None = None

    @classmethod
    def whole(cls, several: Sequence[ShardedParameter]) -> list[jax.Array]:
        """Return whole parameters, whose gradients become gradients of the shards."""
        wire, splits = several[0].wire, tuple(leaf.split for leaf in several)
        shards = [leaf.shard for leaf in several]
        fulls = [leaf.full for leaf in several if leaf.full is not None]
        seconds = [leaf.second for leaf in several if leaf.second is not None]
        given = (fulls, shards) if fulls else (shards, seconds)
        return _wholes(wire, splits, not fulls, *given)

    def carried(self) -> jax.Array:
        """Return this device's shard of a gradient, where `self` is the gradient of a parameter."""
        return self.shard

    @property
    def ahead(self) -> bool:
        """Whether the parameters of a layer are gathered while the previous layer computes."""
        return self.full is None and self.wire.ahead


def defer(
    param: jax.Array,
    split: SplitDim,
    wire: ZeroMessages,
    *,
    sharded: bool,
    second: jax.Array | None,
    once: bool,
) -> ShardedParameter:
    """Build a deferred parameter.

    Args:
      param: this device's shard of the parameter if `sharded`, otherwise the whole parameter.
      split: the split dim of the parameter or of its gradient.
      wire: the collectives.
      sharded: whether the parameter is sharded (stage 3). Otherwise only the parameter's gradient
        is sharded.
      second: the attribute of `ShardedParameter`.
      once: whether to gather the shard here, once for all uses in a step.
    """
    if sharded and not once:
        return ShardedParameter(param, split, wire, second=second)
    dtype = param.dtype
    if sharded:
        gather = partial(wire.gather, dims=[param.ndim + split.dim], lengths=[split.length])
        (param,) = on_blocks(gather, [split.spec])([param])
    shape = [*param.shape]
    shape[split.dim] = -(-shape[split.dim] // axis_size(wire.axes))
    return ShardedParameter(jnp.zeros(shape, dtype), split, wire, param)


Splits = tuple[SplitDim, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _wholes(
    wire: ZeroMessages,
    splits: Splits,
    sharded: bool,
    held: list[jax.Array],
    more: list[jax.Array],
) -> list[jax.Array]:
    """Return whole parameters.

    Args:
      wire: the collectives.
      splits: the split dim of each parameter.
      sharded: whether devices hold shards instead of whole parameters.
      held: the shards, or the whole parameters.
      more: the second copies of the shards, or [] without such copies; for whole parameters, the
        zeros in the shapes of shards.
    """
    if not sharded:
        return held
    dims, lengths = _dims(splits, held), [split.length for split in splits]
    specs = [_of_last(split.spec, shard.ndim) for split, shard in zip(splits, held, strict=True)]
    if more:
        gather = partial(wire.gather_seconds, dims=dims, lengths=lengths)
        return on_blocks(gather, [PartitionSpec(None, *spec) for spec in specs], specs)(more)
    return on_blocks(partial(wire.gather, dims=dims, lengths=lengths), specs)(held)


def _wholes_forward(
    wire: ZeroMessages, splits: Splits, sharded: bool, held: Any, more: Any
) -> tuple[list[jax.Array], PyTree]:
    # The backward pass needs only the dtypes of the arguments, but a residual must be an array, so
    # scalars carry the dtypes. `gather_dtype` does not change the dtypes of gradients.
    like = [[jnp.zeros((), x.dtype) for x in part] for part in (held if sharded else (), more)]
    # Without the condition, scans would keep copies of the whole parameters for the backward pass.
    return _wholes(wire, splits, sharded, held, more) if sharded else held, like


def _wholes_backward(
    wire: ZeroMessages, splits: Splits, sharded: bool, saved: PyTree, cotangents: list[jax.Array]
) -> PyTree:
    of_held, of_more = saved
    summed = _scattered(wire, splits, cotangents)
    shards = of_held if sharded else of_more
    own = [s.astype(x.dtype) for s, x in zip(summed, shards, strict=True)]
    # The other arrays get a gradient of zero, because the gradient of the shards is already the
    # whole gradient.
    if not sharded:
        return [jnp.zeros_like(cotangent) for cotangent in cotangents], own
    shapes = [(axis_size(wire.slow), *s.shape) for s in summed]
    # `of_more` is empty if no second copy of the shards is stored.
    return own, [jnp.zeros(shape, x.dtype) for shape, x in zip(shapes, of_more, strict=False)]


_wholes.defvjp(_wholes_forward, _wholes_backward)


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
