"""Parameters that are fetched where they are used, and whose gradients leave as soon as they are.

Inside a `jax.shard_map` that is manual on the data axes, a model's parameters may be replaced by
these. A layer's weights are then whole for as long as the layer runs, and what comes back from
differentiation is this device's shard of the summed gradient: a whole gradient of the model, or in
stage 3 a whole model, exists at no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

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
    """

    axes: tuple[str, ...]
    algorithm: Algorithm
    gather_dtype: str | None = None
    reduce_dtype: str | None = None

    def gather(self, shard: jax.Array, dim: int) -> jax.Array:
        """The whole tensor, in the dtype of the wire."""
        carried = shard.astype(self.gather_dtype or shard.dtype)
        return all_gather(carried, self.axes, dim=dim, algorithm=self.algorithm)

    def scatter(self, grad: jax.Array, dim: int) -> jax.Array:
        """This device's shard of the sum, in the dtype of the wire."""
        carried = grad.astype(self.reduce_dtype or grad.dtype)
        return reduce_scatter(carried, self.axes, dim=dim, algorithm=self.algorithm)


@partial(jax.tree_util.register_dataclass, data_fields=["shard"], meta_fields=["dim", "wire"])
@dataclass(frozen=True)
class Sharded(Deferred):
    """A parameter of which this device keeps a shard (stage 3).

    Sent per use: an all-gather, and in the backward pass a reduce-scatter.

    Attributes:
      shard: this device's part.
      dim: which dim is split, counted from the end, so that a slice of stacked layers has it too.
    """

    shard: jax.Array
    dim: int
    wire: Wire

    def whole(self) -> jax.Array:
        """The parameter; its gradient is summed into the shard."""
        return _gathered(self.dim, self.wire, self.shard)

    def carried(self) -> jax.Array:
        """Of a gradient: this device's shard."""
        return self.shard


@partial(
    jax.tree_util.register_dataclass, data_fields=["full", "shard"], meta_fields=["dim", "wire"]
)
@dataclass(frozen=True)
class Scattered(Deferred):
    """A parameter that is whole, and whose gradient is not (stage 2).

    Sent per use: a reduce-scatter in the backward pass.

    Attributes:
      full: the parameter; its own gradient is zero.
      shard: zeros of a shard's shape, which the gradient belongs to.
      dim: as for `Sharded`.
    """

    full: jax.Array
    shard: jax.Array
    dim: int
    wire: Wire

    def whole(self) -> jax.Array:
        """The parameter; its gradient is summed into the shard."""
        return _itself(self.dim, self.wire, self.full, self.shard)

    def carried(self) -> jax.Array:
        """Of a gradient: this device's shard."""
        return self.shard


def scattered(full: jax.Array, dim: int, wire: Wire) -> Scattered:
    """A whole parameter with a place for the shard of its gradient.

    Args:
      dim: the dim to split, counted from the front.
    """
    shape = [*full.shape]
    shape[dim] //= axis_size(wire.axes)
    return Scattered(full, jnp.zeros(shape, full.dtype), dim - full.ndim, wire)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(dim: int, wire: Wire, shard: jax.Array) -> jax.Array:
    return wire.gather(shard, shard.ndim + dim)


def _gathered_forward(dim: int, wire: Wire, shard: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _gathered(dim, wire, shard), jnp.zeros((), shard.dtype)


def _gathered_backward(dim: int, wire: Wire, like: jax.Array, cotangent: jax.Array) -> Any:
    return (wire.scatter(cotangent, cotangent.ndim + dim).astype(like.dtype),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _itself(dim: int, wire: Wire, full: jax.Array, shard: jax.Array) -> jax.Array:
    del dim, wire, shard
    return full


def _itself_forward(dim: int, wire: Wire, full: Any, shard: Any) -> tuple[Any, None]:
    del dim, wire, shard
    return full, None


def _itself_backward(dim: int, wire: Wire, _: None, cotangent: jax.Array) -> Any:
    shard = wire.scatter(cotangent, cotangent.ndim + dim)
    return jnp.zeros_like(cotangent), shard.astype(cotangent.dtype)


_itself.defvjp(_itself_forward, _itself_backward)
