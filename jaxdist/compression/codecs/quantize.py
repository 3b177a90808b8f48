"""A codec that rounds elements to integers of a few bits, with a scale for each block."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from pydantic import field_validator

from jaxdist.compression.codecs.fields import Block
from jaxdist.compression.contract import Codec, CodecState, Message, Round
from jaxdist.compression.wire import (
    BITS,
    coarse,
    in_blocks,
    out_of_blocks,
    pack_rows,
    scale_words,
    scales_of,
    unpack_rows,
)
from jaxdist.types import Leaf

MAGIC = 1.5 * 2.0**23
"""A number that rounds a float32 below 2^22 when it is added: the low bits of the sum are the
nearest integer."""


class Quantize(Codec):
    """A codec that encodes each element x as q s, with an integer q and a scale s for each block.

    q is from -L to L, where L = 2^(bits - 1) - 1, and s is the block's largest |x| divided by L.
    Rounding to nearest has an error of at most s / 2. Stochastic rounding rounds up or down at
    random so that the mean of the result is x, and has an error below s. Stochastic rounding is
    from QSGD (Alistarh et al., arXiv 1610.02132, section 3.1), where s depends on the norm instead
    of the largest element.

    Cost: bits / 32 of the bytes of float32, and 2 bytes for each block.
    """

    type: Literal["quantize"] = "quantize"
    """The name that selects this codec in a config."""
    bits: int = 8
    """The number of bits of each element: 8 or 4."""
    block: Block = 256
    """The number of elements that share a scale."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """The rounding of each element. Stochastic rounding is unbiased and needs no error feedback."""

    @field_validator("bits")
    @classmethod
    def _bits(cls, bits: int) -> int:
        if bits not in (4, 8):
            raise ValueError(
                f"{bits} bits are not supported: use 8 or 4 bits, type sign for 1 bit, or type "
                "adaptive for a mixture"
            )
        return bits

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def exact(self) -> bool:
        """Whether residuals are exact, which is true for rounding to nearest only.

        Stochastic rounding may round an element near 0 to the scale of its block, and the
        difference is then rounded.
        """
        return not self.unbiased

    def encode(self, x: jax.Array, state: CodecState, round: Round) -> tuple[Message, CodecState]:
        blocks = in_blocks(x, self.block)
        levels = 2 ** (self.bits - 1) - 1
        scale = coarse(jnp.max(jnp.abs(blocks), axis=1) / levels, up=True)
        whole = blocks * inverse(scale)[:, None]
        if self.unbiased:
            chance = jax.random.uniform(round.own_key, blocks.shape, jnp.float32)
            whole = jnp.floor(whole + chance)
            # The sum with `chance` may be rounded up, to an integer beyond the last level.
            whole = jnp.clip(whole, -levels, levels)
        else:
            # The sum with MAGIC below would round too, but XLA may fuse the product into the sum,
            # which then rounds once instead of twice. XLA computes the codes again for the
            # residual, and these codes could then differ from the codes in the message.
            whole = jnp.round(whole)
        # The low bits of the sum are the code in two's complement; this is faster than a cast.
        codes = jax.lax.bitcast_convert_type(whole + MAGIC, jnp.uint32)
        rows = (codes & (2**self.bits - 1)).reshape(len(blocks), BITS // self.bits, -1)
        return {"codes": pack_rows(rows, self.bits), "scales": scale_words(scale)}, state

    def decode(self, message: Message, like: Leaf, round: Round) -> jax.Array:
        codes = unpack_rows(message["codes"], self.bits)
        spare = BITS - self.bits
        # A shift to the left and a signed shift to the right extend the sign of a 4-bit code.
        signed = jax.lax.bitcast_convert_type(codes << spare, jnp.int8) >> spare
        blocks = signed.astype(jnp.float32) * scales_of(message["scales"])[:, None, None]
        return out_of_blocks(blocks, like.shape)


def inverse(scale: jax.Array) -> jax.Array:
    """Return 1 / scale, or 0 for the scale 0 of a block of zeros."""
    # The last argument is the scale instead of 0, so that the result of a NaN is NaN and the round
    # is found to be not finite.
    return jnp.where(scale > 0, 1.0 / jnp.where(scale > 0, scale, 1.0), scale)
