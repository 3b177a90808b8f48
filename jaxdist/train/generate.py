"""Sampling from a next-token model, which computes its whole window again for each token.

Sampling needs only the model's logits, and therefore works with every model of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.train.step import Program
from jaxdist.types import Buffers, Params


def generate(
    program: Program,
    params: Params,
    buffers: Buffers,
    *,
    prompt: Sequence[int],
    window: int,
    vocab_size: int,
    count: int,
    temperature: float,
    seed: int,
) -> list[int]:
    """Return the prompt's tokens and `count` further tokens.

    Args:
      params: trained parameters, as the program stores them.
      prompt: tokens, of which only the last `window` are used.
      window: the length of the sequences that the model was trained on.
      vocab_size: number of tokens that exist (a padded head has more logits).
      temperature: 0 always takes the most likely token.
      seed: seed of the random choices; the same seed gives the same text.
    """

    def next_token(tokens_L: jax.Array, length: jax.Array, key: jax.Array) -> jax.Array:
        module: Any = program.model.bind(program.home.used_params(params), buffers)
        module.eval()
        logits = module(tokens_L[None], jnp.zeros_like(tokens_L)[None])[0, length - 1, :vocab_size]
        # At temperature 0 only the order of the logits counts; the bound avoids a division by 0.
        scaled = logits.astype(jnp.float32) / max(temperature, 1e-6)
        return jax.random.categorical(key, scaled) if temperature > 0 else scaled.argmax()

    sample = jax.jit(next_token)
    out = list(prompt)
    for i in range(count):
        seen = out[-window:]
        # A single shape for all lengths is compiled once. Attention is causal, so padding at the
        # end has no effect.
        padded = np.zeros(window, np.int32)
        padded[: len(seen)] = seen
        key = jax.random.fold_in(jax.random.key(seed), i)
        out.append(int(sample(jnp.asarray(padded), jnp.int32(len(seen)), key)))
    return out
