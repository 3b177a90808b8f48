"""A codec that sends a matrix as the product of two thin matrices."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
from pydantic import Field

from jaxdist.compression.contract import (
    CodecState,
    Factored,
    Factors,
    LinearCodec,
    Round,
    described,
)
from jaxdist.config.schema import Count
from jaxdist.errors import CompressionError
from jaxdist.types import Leaf

DEPENDENT = 1e-6
"""A column counts as dependent on earlier columns if less than this fraction of its norm is left
after the projections on these columns are subtracted. The rest is then only rounding error."""


class LowRank(LinearCodec):
    """The codec PowerSGD (Vogels et al., arXiv 1905.13727, algorithm 1).

    A matrix M is sent as two thin matrices, by one step of a power iteration. P = M Q, with the Q
    of the previous round, is summed over devices and orthogonalized (Gram-Schmidt). Then Q_own =
    M^T P is summed over devices to Q. The estimate of the sum is P Q^T, and the estimate of this
    device's matrix is P Q_own^T. An array of more than two dims is reshaped to a matrix: its first
    dims become the rows and its last dims the columns, with the split that gives the smallest
    factors.

    Cost: 4 r (m + n) bytes for an m x n matrix, in two all-reduces.
    """

    type: Literal["lowrank"] = "lowrank"
    """The name that selects this codec in a config."""
    rank: Count = 4
    """The rank r of the approximation, which is the number of columns of both factors. A larger
    rank sends more bytes and loses less of the gradient."""
    stacked_dims: Annotated[int, Field(ge=0, le=4)] = 0
    """The number of first dims that count separate matrices, such as the layers of a scanned model.
    """
    seed: int = 0
    """The seed of the first factor Q, which is the same on all devices."""

    flat: ClassVar[bool] = False

    @property
    def exact(self) -> bool:
        """Whether residuals are exact; they are not for a small element with a large estimate."""
        return False

    def check(self, like: Leaf, name: str = "") -> None:
        super().check(like, name)
        if len(like.shape) - self.stacked_dims < 2:
            stacked = (
                f" ({self.stacked_dims} of the array's dims are stacked layers)"
                if self.stacked_dims
                else ""
            )
            raise CompressionError(
                f"{described(self, like, name)}: lowrank needs a matrix{stacked}; send this array "
                "uncompressed with a rule (codec whole)"
            )
        _, rows, columns = self._sizes(like)
        if self.rank > min(rows, columns):
            raise CompressionError(
                f"{described(self, like, name)}: rank {self.rank} exceeds the largest rank of a "
                f"{rows} x {columns} matrix: set {min(rows, columns)} or less, or send the array "
                "uncompressed with a rule (codec whole)"
            )

    def init(self, like: Leaf) -> CodecState:
        count, _, columns = self._sizes(like)
        shape = (count, columns, self.rank)
        return {"q": jax.random.normal(jax.random.key(self.seed), shape, jnp.float32)}

    def factors(self, x: jax.Array, state: CodecState, round: Round) -> Factors:
        m = x.astype(jnp.float32).reshape(self._sizes(x))
        p = orthogonal((yield product(m, state["q"])))
        own = product(jnp.swapaxes(m, 1, 2), p)
        total = yield own
        # A column of zeros would remain zero in all later rounds, so the old column is kept until a
        # gradient is not zero.
        alive = jnp.any(total != 0, axis=1, keepdims=True)
        return Factored((p, own), (p, total), {"q": jnp.where(alive, total, state["q"])})

    def expand(self, factors: tuple[jax.Array, ...], like: Leaf, round: Round) -> jax.Array:
        p, q = factors
        return product(p, jnp.swapaxes(q, 1, 2)).reshape(like.shape)

    def _sizes(self, like: Leaf) -> tuple[int, int, int]:
        stacked, rest = like.shape[: self.stacked_dims], like.shape[self.stacked_dims :]
        ways = [(math.prod(rest[:i]), math.prod(rest[i:])) for i in range(1, len(rest))]
        return math.prod(stacked), *min(reversed(ways), key=sum)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply matrices in full float32 precision on every kind of device."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def orthogonal(columns: jax.Array) -> jax.Array:
    """Orthonormalize the columns of [..., m, r] by the modified Gram-Schmidt process.

    The projections on earlier columns are subtracted twice. A column that is a linear combination
    of earlier columns, up to rounding, becomes zero.
    """
    done: list[jax.Array] = []
    for index in range(columns.shape[-1]):
        column = _of_length_one(columns[..., index])
        rest = column
        # The loop subtracts every projection twice. After a single pass, a column that nearly
        # depends on earlier columns would not be orthogonal to these columns, because of rounding
        # errors.
        for other in done * 2:
            rest = rest - jnp.sum(other * rest, axis=-1, keepdims=True) * other
        left = jnp.sum(rest * rest, axis=-1, keepdims=True)
        # `left` is the square of a norm, so it is compared with the square of the limit.
        done.append(jnp.where(left > DEPENDENT**2, _of_length_one(rest), 0.0))
    return jnp.stack(done, axis=-1)


def _of_length_one(column: jax.Array) -> jax.Array:
    """Divide a column by its largest element, so that no square overflows, and then by its norm.

    A column of zeros is returned unchanged.
    """
    largest = jnp.max(jnp.abs(column), axis=-1, keepdims=True)
    scaled = column / jnp.where(largest > 0, largest, 1.0)
    square = jnp.sum(scaled * scaled, axis=-1, keepdims=True)
    return scaled / jnp.sqrt(jnp.where(square > 0, square, 1.0))
