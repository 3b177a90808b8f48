"""The padding of vocabularies to a size that the mesh can divide.

Dims: B batch, L sequence, V vocab.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.models.hints import WITHIN, Hint
from jaxdist.models.layers import Initializer


def padded_size(size: int, multiple: int) -> int:
    """Return the number of tokens of a padded vocabulary: `size`, rounded up to `multiple`.

    >>> padded_size(257, 64)
    320
    """
    return -(-size // multiple) * multiple


def filled_up(*drawn: int) -> Initializer:
    """Return an initializer that draws normal weights of shape `drawn`, and pads them with zeros.

    The size of the padding follows from the shape that the initializer is called with. The drawn
    weights do not depend on the padding.
    """

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        weights = nnx.initializers.normal(0.02)(key, drawn, dtype)
        more = [(0, whole - own) for whole, own in zip(shape, drawn, strict=True)]
        return jnp.pad(weights, more) if any(n for _, n in more) else weights

    return init


def hide_padding(logits_BLV: jax.Array, size: int) -> jax.Array:
    """Return logits in which the padding of a vocabulary of `size` tokens has probability 0.

    The softmax of the result equals the softmax without padding. A mask needs no communication,
    unlike a slice of a split vocabulary.
    """
    if logits_BLV.shape[-1] == size:
        return logits_BLV
    # The mask is added. For a select, XLA would keep a loop-invariant mask, as large as the logits,
    # in memory. The gradient of the padding is still 0, since its probability is 0. The added
    # values are finite, since a difference of infinities is NaN.
    least = float(jnp.finfo(logits_BLV.dtype).min) / 2
    bias_V = jnp.where(jnp.arange(logits_BLV.shape[-1]) < size, 0.0, least)
    return logits_BLV + bias_V.astype(logits_BLV.dtype).reshape(1, 1, -1)


def cut_padding(logits_BLV: jax.Array, size: int, hint: Hint) -> jax.Array:
    """Return the logits of the `size` tokens of a vocabulary, without its padding."""
    if logits_BLV.shape[-1] == size:
        return logits_BLV
    # XLA turns a slice of an unevenly split dim into a permute over all devices. The stages of a
    # pipeline on CPU would wait forever for this permute. A gather waits only for the devices among
    # which the dim is split.
    whole_BLV = hint(logits_BLV, *WITHIN[:2], None, was=(*WITHIN[:2], "vocab"))
    return whole_BLV[..., :size]
