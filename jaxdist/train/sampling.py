"""The choice of a token from the logits of a next-token model.

Dims: B texts, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Sampling:
    """The settings with which a token is chosen from logits.

    Attributes:
      temperature: the divisor of the logits; 0 always selects the most likely token.
      top_k: the number of most likely tokens to choose among, or None for all tokens.
      top_p: a probability. The choice is among the most likely tokens, as few as possible, whose
        probabilities add up to `top_p`.
      seed: the seed of the choices, which depend on the index of a text in its batch, but not on
        the other texts.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    # The seed is not compared, so that instances that differ only in the seed share a compiled
    # program. The program receives the random key as an argument.
    seed: int = field(default=0, compare=False)

    def draw(self, logits_BV: jax.Array, number: jax.Array, key: jax.Array) -> jax.Array:
        """Choose the next token of each text, int32 `[B]`.

        Args:
          number: the number of earlier choices for these texts.
          key: the random key of `seed`.
        """
        if self.temperature == 0:
            return logits_BV.argmax(-1).astype(jnp.int32)
        scaled_BV = self._kept(logits_BV / self.temperature)
        key = jax.random.fold_in(key, number)
        rows = jnp.arange(logits_BV.shape[0])
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
        return jax.vmap(jax.random.categorical)(keys, scaled_BV).astype(jnp.int32)

    def _kept(self, logits_BV: jax.Array) -> jax.Array:
        """Return the logits, with -inf for the tokens that `top_k` and `top_p` exclude."""
        if self.top_k is not None:
            least_B1 = jax.lax.top_k(logits_BV, min(self.top_k, logits_BV.shape[1]))[0][:, -1:]
            logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
        if self.top_p < 1:
            sorted_BV = -jnp.sort(-logits_BV, axis=-1)
            shares_BV = jax.nn.softmax(sorted_BV, -1)
            # A token is kept if the likelier tokens together do not reach `top_p`, so the likeliest
            # token is always kept.
            stays_BV = jnp.cumsum(shares_BV, -1) - shares_BV < self.top_p
            least_B1 = jnp.where(stays_BV, sorted_BV, jnp.inf).min(-1, keepdims=True)
            logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
        return logits_BV
