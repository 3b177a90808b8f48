"""A codec that sends random elements of an array, at the same positions on all devices."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jaxdist.compression.codecs.fields import Fraction
from jaxdist.compression.contract import CodecState, Factored, Factors, LinearCodec, Message, Round
from jaxdist.compression.wire import in_blocks, out_of_blocks
from jaxdist.types import Leaf


class RandomK(LinearCodec):
    """A codec that sends a random element of each c = 1 / fraction adjacent elements.

    All devices draw the same positions from the key of the round. Positions are therefore not sent,
    and messages can be summed. (The codec is the random-k of Stich et al., arXiv 1809.07599,
    section 2, except that the draw is stratified.) With `scaled`, elements are multiplied by c
    before they are sent. The estimate is then unbiased, with a variance of c - 1 times the
    element's square, and error feedback must be off.

    Cost: 4 bytes for each element that is sent.
    """

    type: Literal["randomk"] = "randomk"
    """The name that selects this codec in a config."""
    fraction: Fraction = 0.01
    """The fraction of the elements to send, above 0 and at most 1; 1 / fraction is rounded."""
    scaled: bool = False
    """Whether to multiply each sent element by 1 / fraction, which makes the estimate unbiased."""

    @property
    def unbiased(self) -> bool:
        return self.scaled

    @property
    def neighbours(self) -> int:
        """The number c of adjacent elements from which a single element is drawn."""
        return max(1, round(1 / self.fraction))

    def select(self, x: jax.Array, round: Round) -> tuple[Message, jax.Array]:
        rows = in_blocks(x, self.neighbours)
        drawn = self._drawn(len(rows), round)
        values = jnp.take_along_axis(rows, drawn[:, None], axis=1)[:, 0]
        return (), values * self.neighbours if self.scaled else values

    def place(self, where: Message, values: jax.Array, like: Leaf, round: Round) -> jax.Array:
        drawn = self._drawn(len(values), round)
        columns = jnp.arange(self.neighbours, dtype=jnp.int32)
        rows = jnp.where(columns[None] == drawn[:, None], values[:, None], 0.0)
        return out_of_blocks(rows, like.shape)

    def factors(self, x: jax.Array, state: CodecState, round: Round) -> Factors:
        _, values = self.select(x, round)
        return Factored((values,), ((yield values),), state)

    def expand(self, factors: tuple[jax.Array, ...], like: Leaf, round: Round) -> jax.Array:
        return self.place((), factors[0], like, round)

    def _drawn(self, rows: int, round: Round) -> jax.Array:
        return jax.random.randint(round.key, (rows,), 0, self.neighbours)
