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
from jaxdist.collectives.operations import all_gather, reduce_scatter
from jaxdist.models.layers import Deferred


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

    def gather(self, shard: jax.Array, dim: int, length: int | None = None) -> jax.Array:
        """The whole tensor, in the dtype of the wire; its dim cut to `length`."""
        carried = shard.astype(self.gather_dtype or shard.dtype)
        return all_gather(carried, self.axes, dim=dim, size=length, algorithm=self.algorithm)

    def scatter(self, grad: jax.Array, dim: int) -> jax.Array:
        """This device's shard of the sum, in the dtype of the wire; zeros fill up the last ones."""
        carried = grad.astype(self.reduce_dtype or grad.dtype)
        return reduce_scatter(carried, self.axes, dim=dim, algorithm=self.algorithm)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["shard"],
    meta_fields=["dim", "wire", "spec", "length"],
)
@dataclass(frozen=True)
class Sharded(Deferred):
    """A parameter of which this device keeps a shard (stage 3).

    Sent per use: an all-gather, and in the backward pass a reduce-scatter.

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

    def whole(self) -> jax.Array:
        """The parameter; its gradient is summed into the shard."""
        return _gathered(self.dim, self.wire, self.spec, self.length, self.shard)

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

    def whole(self) -> jax.Array:
        """The parameter; its gradient is summed into the shard."""
        return _itself(self.dim, self.wire, self.spec, self.full, self.shard)

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
) -> Any:
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


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _gathered(
    dim: int, wire: Wire, spec: PartitionSpec, length: int | None, shard: jax.Array
) -> jax.Array:
    return _on_block(lambda x: wire.gather(x, x.ndim + dim, length), spec, shard)


def _gathered_forward(
    dim: int, wire: Wire, spec: PartitionSpec, length: int | None, shard: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _gathered(dim, wire, spec, length, shard), jnp.zeros((), shard.dtype)


def _gathered_backward(
    dim: int,
    wire: Wire,
    spec: PartitionSpec,
    length: int | None,
    like: jax.Array,
    cotangent: jax.Array,
) -> Any:
    del length
    summed = _on_block(lambda x: wire.scatter(x, x.ndim + dim), spec, cotangent)
    return (summed.astype(like.dtype),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def on_blocks(
    function: Callable[[list[jax.Array]], list[jax.Array]], specs: Sequence[PartitionSpec]
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """`function` of each device's blocks of arrays whose last dims automatic axes split by `specs`.

    On the whole arrays XLA would gather what those axes split before it sends anything.
    """

    def run(arrays: list[jax.Array]) -> list[jax.Array]:
        mesh = jax.sharding.get_abstract_mesh()
        free = {axis for axis in mesh.auto_axes if mesh.shape[axis] > 1}
        if not free:
            return function(arrays)
        blocks = [
            PartitionSpec(*spec[len(spec) - x.ndim :]) if len(spec) > x.ndim else spec
            for spec, x in zip(specs, arrays, strict=True)
        ]
        return jax.shard_map(
            function, axis_names=free, in_specs=(blocks,), out_specs=blocks, check_vma=False
        )(arrays)

    return run


def _on_block(
    function: Callable[[jax.Array], jax.Array], spec: PartitionSpec, x: jax.Array
) -> jax.Array:
    return on_blocks(lambda arrays: [function(*arrays)], [spec])([x])[0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _itself(
    dim: int, wire: Wire, spec: PartitionSpec, full: jax.Array, shard: jax.Array
) -> jax.Array:
    del dim, wire, spec, shard
    return full


def _itself_forward(
    dim: int, wire: Wire, spec: PartitionSpec, full: Any, shard: Any
) -> tuple[Any, None]:
    del dim, wire, spec, shard
    return full, None


def _itself_backward(
    dim: int, wire: Wire, spec: PartitionSpec, _: None, cotangent: jax.Array
) -> Any:
    summed = _on_block(lambda x: wire.scatter(x, x.ndim + dim), spec, cotangent)
    return jnp.zeros_like(cotangent), summed.astype(cotangent.dtype)


_itself.defvjp(_itself_forward, _itself_backward)
