"""Products of rows with the kernels of their experts.

The rows are sorted by expert, and `counts_E[e]` is the number of rows of expert e. The product of a
row after the last expert's rows is undefined, and the gradient of such a row too.

Dims: R rows, E experts, D features in, F features out, n blocks of m rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.cost.kernels import LANES, grouped_tiles
from jaxdist.errors import ConfigError
from jaxdist.models.feed_forward.config import ProductName

TILE = LANES
"""The number of rows, and of columns, of a tile in a TPU's matmul unit."""


class Product(Protocol):
    """A method to multiply rows by the kernels of their experts."""

    def __call__(self, x_RD: jax.Array, w_EDF: jax.Array, counts_E: jax.Array, block: int) -> Any:
        """Return the product `[R, F]` of each row with its expert's kernel, in the dtype of x.

        Args:
          x_RD: the rows of all experts.
          w_EDF: the kernels of the experts.
          counts_E: the number of rows of each expert, a multiple of `block`.
          block: the result of the method `block`, which divides R.
        """
        ...

    def block(self, rows: int, experts: int) -> int:
        """Return the number of which the count of each expert must be a multiple.

        Args:
          rows: the number of rows of all experts.
          experts: the number of experts.
        """
        del rows, experts
        return 1


@dataclass(frozen=True)
class Loop(Product):
    """A loop over blocks of rows, each with a single expert; empty blocks are skipped."""

    def __call__(self, x_RD: jax.Array, w_EDF: jax.Array, counts_E: jax.Array, block: int) -> Any:
        """Multiply block by block, as `Product` specifies."""
        return _looped(x_RD, w_EDF, jnp.cumsum(counts_E), block)

    def block(self, rows: int, experts: int) -> int:
        """Return the number of rows in a block, a power of two from 8 to 128.

        The number is about a quarter of the rows of an expert under an even load.
        """
        quarter = max(1, rows // (4 * experts))
        return min(TILE, max(8, 1 << (quarter.bit_length() - 1)))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _looped(x_RD: jax.Array, w_EDF: jax.Array, ends_E: jax.Array, m: int) -> jax.Array:
    w_EDF = w_EDF.astype(x_RD.dtype)

    def one(piece: tuple[jax.Array, ...]) -> jax.Array:
        x_mD, expert = piece
        shape = m, w_EDF.shape[2]
        # For a block after the rows of the last expert, `expert` is `len(ends_E)`. The product of
        # such a block is not computed, and `minimum` keeps the index in range.
        return lax.cond(
            expert < len(ends_E),
            lambda: x_mD @ w_EDF[jnp.minimum(expert, len(ends_E) - 1)],
            lambda: jnp.zeros(shape, x_mD.dtype),
        )

    experts_n = _experts_of_blocks(ends_E, len(x_RD), m)
    return lax.map(one, (x_RD.reshape(-1, m, x_RD.shape[1]), experts_n)).reshape(len(x_RD), -1)


def _experts_of_blocks(ends_E: jax.Array, rows: int, m: int) -> jax.Array:
    starts_n = jnp.arange(rows // m) * m
    return jnp.searchsorted(ends_E, starts_n, side="right").astype(jnp.int32)


def _looped_forward(x: jax.Array, w: jax.Array, ends: jax.Array, m: int) -> Any:
    return _looped(x, w, ends, m), (x, w, ends)


def _looped_backward(m: int, kept: Any, grad_RF: jax.Array) -> Any:
    x_RD, w_EDF, ends_E = kept
    of_x = _looped(grad_RF, w_EDF.swapaxes(1, 2), ends_E, m)
    count = len(ends_E)

    def add(total: jax.Array, piece: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x_mD, grad_mF, expert = piece
        at = jnp.minimum(expert, count - 1)
        more = lax.cond(
            expert < count,
            lambda: jnp.matmul(x_mD.T, grad_mF, preferred_element_type=total.dtype),
            lambda: jnp.zeros(total.shape[1:], total.dtype),
        )
        return total.at[at].add(more), None

    blocks = x_RD.reshape(-1, m, x_RD.shape[1]), grad_RF.reshape(-1, m, grad_RF.shape[1])
    experts_n = _experts_of_blocks(ends_E, len(x_RD), m)
    wide = jnp.promote_types(w_EDF.dtype, jnp.float32)
    of_w, _ = lax.scan(add, jnp.zeros(w_EDF.shape, wide), (*blocks, experts_n))
    return of_x, of_w.astype(w_EDF.dtype), None


_looped.defvjp(_looped_forward, _looped_backward)


@dataclass(frozen=True)
class RaggedDot(Product):
    """The method `ragged_dot`: a single `jax.lax.ragged_dot`, as XLA compiles it."""

    def __call__(self, x_RD: jax.Array, w_EDF: jax.Array, counts_E: jax.Array, block: int) -> Any:
        """Multiply all rows in one operation, as `Product` specifies."""
        return lax.ragged_dot(x_RD, w_EDF.astype(x_RD.dtype), counts_E)


@dataclass(frozen=True)
class Megablox(Product):
    """The kernel of megablox (Gale et al., arXiv 2211.15841), for TPU, from jax's library."""

    def __call__(self, x_RD: jax.Array, w_EDF: jax.Array, counts_E: jax.Array, block: int) -> Any:
        """Multiply by the Pallas kernel, as `Product` specifies.

        D and F must be multiples of 128.
        """
        from jax.experimental.pallas.ops.tpu.megablox import gmm

        rows = len(x_RD)
        x_RD = jnp.pad(x_RD, ((0, -rows % TILE), (0, 0)))
        narrow = x_RD.dtype.itemsize == 2
        experts, depth, width = w_EDF.shape
        tiling = grouped_tiles(len(x_RD), depth, width, experts=experts, narrow=narrow)
        return gmm(x_RD, w_EDF.astype(x_RD.dtype), counts_E, x_RD.dtype, tiling)[:rows]


PRODUCTS: Mapping[ProductName, Callable[[], Product]] = {
    "loop": Loop,
    "ragged_dot": RaggedDot,
    "megablox": Megablox,
}


def choose_product(name: ProductName, platform: str | None, *widths: int) -> Product:
    """Return the named product, or for `auto` the best product on the devices of a platform.

    Args:
      platform: the platform of the devices, as jax names it, or None if it is unknown.
      widths: the numbers of input and output features.

    Raises:
      ConfigError: the product is megablox, but the devices are not TPUs, or the tiles of megablox
        do not divide the widths.
    """
    fits = platform == "tpu" and all(width % TILE == 0 for width in widths)
    if name == "megablox" and not fits:
        why = (
            f"the tiles of {TILE} do not divide the widths {' and '.join(map(str, widths))}"
            if platform == "tpu"
            else (
                "the product runs only on TPUs, but the platform of these devices is "
                f"{platform or 'unknown'}"
            )
        )
        raise ConfigError(
            f"model.experts.product megablox: {why}; set product: auto",
            setting=("experts", "product"),
        )
    if name == "auto":
        name = "megablox" if fits else "ragged_dot" if platform in ("tpu", "gpu") else "loop"
    return PRODUCTS[name]()
