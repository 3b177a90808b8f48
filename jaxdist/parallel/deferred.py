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


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["shard"],
    meta_fields=["dim", "axes", "algorithm"],
)
@dataclass(frozen=True)
class Sharded(Deferred):
    """A parameter of which this device keeps a shard (stage 3).

    Sent per use: an all-gather, and in the backward pass a reduce-scatter.

    Attributes:
      shard: this device's part.
      dim: which dim is split, counted from the end, so that a slice of stacked layers has it too.
      axes: manual mesh axes over which it is.
    """

    shard: jax.Array
    dim: int
    axes: tuple[str, ...]
    algorithm: Algorithm

    def whole(self) -> jax.Array:
        """The parameter; its gradient is summed into the shard."""
        dim = self.shard.ndim + self.dim
        return all_gather(self.shard, self.axes, dim=dim, algorithm=self.algorithm)

    def carried(self) -> jax.Array:
        """Of a gradient: this device's shard."""
        return self.shard


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["full", "shard"],
    meta_fields=["dim", "axes", "algorithm"],
)
@dataclass(frozen=True)
class Scattered(Deferred):
    """A parameter that is whole, and whose gradient is not (stage 2).

    Sent per use: a reduce-scatter in the backward pass.

    Attributes:
      full: the parameter; its own gradient is zero.
      shard: zeros of a shard's shape, which the gradient belongs to.
      dim, axes: as for `Sharded`.
    """

    full: jax.Array
    shard: jax.Array
    dim: int
    axes: tuple[str, ...]
    algorithm: Algorithm

    def whole(self) -> jax.Array:
        """The parameter; its gradient is summed into the shard."""
        return _identity(self.dim, self.axes, self.algorithm, self.full, self.shard)

    def carried(self) -> jax.Array:
        """Of a gradient: this device's shard."""
        return self.shard


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _identity(
    dim: int, axes: tuple[str, ...], algorithm: Algorithm, full: jax.Array, shard: jax.Array
) -> jax.Array:
    del dim, axes, algorithm, shard
    return full


def _forward(dim: int, axes: Any, algorithm: Algorithm, full: Any, shard: Any) -> tuple[Any, None]:
    del dim, axes, algorithm, shard
    return full, None


def _backward(dim: int, axes: Any, algorithm: Algorithm, _: None, cotangent: jax.Array) -> Any:
    whole_dim = cotangent.ndim + dim
    shard = reduce_scatter(cotangent, axes, dim=whole_dim, algorithm=algorithm)
    return jnp.zeros_like(cotangent), shard


_identity.defvjp(_forward, _backward)


def scattered(full: jax.Array, dim: int, axes: tuple[str, ...], algorithm: Algorithm) -> Scattered:
    """A whole parameter with a place for the shard of its gradient.

    Args:
      dim: the dim to split, counted from the front.
    """
    shape = [*full.shape]
    shape[dim] //= axis_size(axes)
    shard = jnp.zeros(shape, full.dtype)
    return Scattered(full, shard, dim - full.ndim, axes, algorithm)
