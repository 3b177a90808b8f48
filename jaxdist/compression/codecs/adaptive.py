"""A codec with adaptive quantization, which uses more bits for blocks with more energy."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from pydantic import field_validator

from jaxdist.compression.codecs.fields import Block
from jaxdist.compression.codecs.quantize import inverse
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


class Adaptive(Codec):
    """A codec that rounds elements to integers, with 0 or 2 to 8 bits for each block.

    The energy E of a block is the sum of its squares. With b bits the block has an error of about
    E 4^-b, so each further bit removes less error than the previous bit. Each bit is allocated to
    the block in which it removes the most error. This greedy allocation is optimal for such gains
    (Shoham and Gersho, IEEE Trans. ASSP 36(9), 1988).

    A plane has one bit for each element of a block. A message has a fixed number of planes, so its
    size is fixed. The number of planes of each block depends on the gradient, and is computed in
    each round.

    Cost: bits / 32 of the bytes of float32, and 3 bytes for each block.
    """

    type: Literal["adaptive"] = "adaptive"
    """The name that selects this codec in a config."""
    bits: float = 4.0
    """The number of bits of an element on average over the blocks, from 1 to 8."""
    block: Block = 512
    """The number of elements that share a scale and a number of bits."""

    @field_validator("bits")
    @classmethod
    def _bits(cls, bits: float) -> float:
        if not 1 <= bits <= BITS:
            raise ValueError(
                f"{bits:g} bits on average are out of range: use a number from 1 to 8, such as 4"
            )
        return bits

    def planes(self, blocks: int) -> int:
        """Return the number of one-bit planes in the message of an array of `blocks` blocks."""
        # `allocate` gives a block either no bits or at least two bits, so a single plane would be
        # useless.
        return max(2, int(self.bits * blocks))

    def encode(self, x: jax.Array, state: CodecState, round: Round) -> tuple[Message, CodecState]:
        blocks = in_blocks(x, self.block)
        count = len(blocks)
        bits = allocate(jnp.sum(blocks * blocks, axis=1), self.planes(count))
        levels = _levels(bits)
        most = jnp.max(jnp.abs(blocks), axis=1)
        scale = coarse(jnp.where(bits > 0, most / jnp.maximum(levels, 1.0), 0.0), up=True)
        # A block without bits has scale 0 and codes 0. But if a value of the block is not finite,
        # the scale is this value, so that the round is found to be not finite.
        scale = jnp.where(jnp.isfinite(most), scale, most)
        codes = jnp.round(blocks * inverse(scale)[:, None]) + levels[:, None]
        rows = codes.astype(jnp.uint32).reshape(count, BITS, -1)
        all_planes = jnp.stack([pack_rows((rows >> bit) & 1, 1) for bit in range(BITS)], axis=1)
        block, bit = _slots(bits, self.planes(count))
        planes = all_planes[block, bit]
        return {
            "planes": planes,
            "bits": bits.astype(jnp.uint8),
            "scales": scale_words(scale),
        }, state

    def decode(self, message: Message, like: Leaf, round: Round) -> jax.Array:
        bits = message["bits"].astype(jnp.int32)
        starts = jnp.cumsum(bits) - bits
        planes = message["planes"]
        code = jnp.zeros((len(bits), BITS, self.block // BITS), jnp.uint32)
        for bit in range(BITS):
            there = bit < bits
            plane = planes[jnp.where(there, starts + bit, 0)]
            plane = jnp.where(there[:, None], plane, jnp.uint8(0))
            code = code | (unpack_rows(plane, 1).astype(jnp.uint32) << bit)
        signed = code.astype(jnp.float32) - _levels(bits)[:, None, None]
        return out_of_blocks(signed * scales_of(message["scales"])[:, None, None], like.shape)


def allocate(energy: jax.Array, planes: int) -> jax.Array:
    """Return the number of bits of each block, int32 [blocks]: 0, or from 2 to 8.

    Args:
      energy: the sum of squares of each block, float32 [blocks].
      planes: the largest allowed sum of the numbers of bits of all blocks.
    """
    # Each gain is the part of an error E 4^-b that a plane removes. The first two planes have equal
    # gains and are allocated together, since a single bit has no zero between its levels.
    gains = [(1 - 4.0**-2) / 2] * 2 + [4.0**-bit - 4.0 ** -(bit + 1) for bit in range(2, BITS)]
    taken = energy[None] * jnp.asarray(gains, jnp.float32)[:, None]
    # The sort is stable and the gains are in the order of the bits. If gains are equal, a block
    # therefore gets an earlier bit before a later bit.
    order = jnp.argsort(-taken.reshape(-1), stable=True)[:planes]
    # The gains are flattened bit by bit, so the remainder is the index of the block.
    bits = jnp.zeros_like(energy, jnp.int32).at[order % len(energy)].add(1)
    # `planes` may end between the first two planes of a block, and a single plane is useless.
    return jnp.where(bits == 1, 0, bits)


def _levels(bits: jax.Array) -> jax.Array:
    """Return the largest signed code of `bits` bits, as float32, or 0 for 0 bits."""
    return jnp.where(bits > 0, (1 << jnp.maximum(bits - 1, 0)) - 1, 0).astype(jnp.float32)


def _slots(bits: jax.Array, planes: int) -> tuple[jax.Array, jax.Array]:
    """Return the block of each plane, and the bit of the block's codes that the plane contains.

    Both results are int32 [planes].
    """
    ends = jnp.cumsum(bits)
    slots = jnp.arange(planes, dtype=bits.dtype)
    block = jnp.minimum(jnp.searchsorted(ends, slots, side="right"), len(bits) - 1)
    bit = slots - (ends - bits)[block]
    return block, jnp.clip(bit, 0, BITS - 1)
