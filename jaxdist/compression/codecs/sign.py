"""A codec that sends a single bit for each element."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jaxdist.compression.codecs.fields import Block
from jaxdist.compression.contract import Codec, CodecState, Message, Round
from jaxdist.compression.wire import (
    BITS,
    block_sizes,
    coarse,
    in_blocks,
    out_of_blocks,
    pack_rows,
    scale_words,
    scales_of,
    to_words,
    unpack_rows,
)
from jaxdist.types import Leaf


class Sign(Codec):
    """A codec that sends the sign of each element, and the mean absolute value of each block.

    The codec is biased and needs error feedback (Seide et al., 2014; Karimireddy et al., arXiv
    1901.09847, section 5). The second paper computes one scale for all elements; here each block
    has a separate scale. The sign of a zero is its sign bit.

    Cost: 1 / 32 of the bytes of float32, and 2 bytes for each block.
    """

    type: Literal["sign"] = "sign"
    """The name that selects this codec in a config."""
    block: Block = 1024
    """The number of elements that share a scale."""

    @property
    def exact(self) -> bool:
        """Whether residuals are exact; they are not for elements far below the block's mean."""
        return False

    def encode(self, x: jax.Array, state: CodecState, round: Round) -> tuple[Message, CodecState]:
        blocks = in_blocks(x, self.block)
        # `jnp.mean` would also count the zeros of padding in the last block.
        mean = jnp.sum(jnp.abs(blocks), axis=1) / block_sizes(x.size, self.block)
        # The sign bit itself is sent, because a comparison with 0 has three results, and a bit has
        # only two values.
        rows = (to_words(blocks) >> 31).reshape(len(blocks), BITS, -1)
        scales = scale_words(coarse(mean, up=False))
        return {"signs": pack_rows(rows, 1), "scales": scales}, state

    def decode(self, message: Message, like: Leaf, round: Round) -> jax.Array:
        scale = scales_of(message["scales"])[:, None, None]
        blocks = jnp.where(unpack_rows(message["signs"], 1) == 0, scale, -scale)
        return out_of_blocks(blocks, like.shape)
