"""A codec that rounds elements to a float type of fewer bits."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jaxdist.compression.contract import Codec, CodecState, Message, Round
from jaxdist.compression.wire import from_words, power_of_two, scale_words, scales_of, to_words
from jaxdist.types import Leaf

Small = Literal["bfloat16", "float16", "float8_e4m3", "float8_e5m2"]
DTYPES = {
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "float8_e4m3": jnp.float8_e4m3fn,
    "float8_e5m2": jnp.float8_e5m2,
}


class Cast(Codec):
    """A codec that rounds each element to a smaller float type.

    The array is first scaled to the range of this type. The scale is the largest power of two for
    which the largest element is in the range (one scale for each tensor: Peng et al., FP8-LM, arXiv
    2310.18313, section 2.1). Scaling by a power of two does not round. bfloat16 has the range of
    float32 and needs no scale.
    """

    type: Literal["cast"] = "cast"
    """The name that selects this codec in a config."""
    dtype: Small = "bfloat16"
    """The float type to which each element is rounded."""

    def encode(self, x: jax.Array, state: CodecState, round: Round) -> tuple[Message, CodecState]:
        small, wide = DTYPES[self.dtype], x.astype(jnp.float32)
        if self.dtype == "bfloat16":
            return {"values": to_words(wide.astype(small))}, state
        most = jnp.max(jnp.abs(wide))
        # Without the lower limit of 2^-100, an array of zeros would have an infinite scale, and the
        # decoded array would be NaN.
        limit = float(jnp.finfo(small).max) / jnp.maximum(most, 2.0**-100)
        # float8_e4m3fn has no infinities. A scale of NaN makes all decoded elements NaN instead, so
        # that the round is found to be not finite.
        scale = jnp.where(jnp.isfinite(most), power_of_two(limit), jnp.nan)
        values = (wide * scale).astype(small)
        return {"values": to_words(values), "scale": scale_words(scale[None])}, state

    def decode(self, message: Message, like: Leaf, round: Round) -> jax.Array:
        values = from_words(message["values"], DTYPES[self.dtype]).astype(jnp.float32)
        if self.dtype != "bfloat16":
            values = values / scales_of(message["scale"])[0]
        return values.reshape(like.shape)
