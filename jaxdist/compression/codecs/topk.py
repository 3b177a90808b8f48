"""A codec that sends the largest elements of an array."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.compression.codecs.fields import Fraction
from jaxdist.compression.contract import Codec, CodecState, Exchange, Message, Round
from jaxdist.compression.wire import from_words, to_words
from jaxdist.types import Leaf

HITS, LEAST_SAMPLE = 128, 4096
"""The number of sampled elements above the threshold, and the size of the smallest sample. With 128
such elements, the number of all elements above the threshold has an error of about 9%."""
WORD, LANES = 32, 128
"""The number of bits of a word, and the number of words in a row of words."""


class TopK(Codec):
    """A codec that sends the k elements of largest absolute value, with their positions.

    The method `sampled` estimates a threshold from a sample instead of sorting all elements, as
    Deep Gradient Compression does (Lin et al., arXiv 1712.01887, section 3). If more than k
    elements exceed the threshold, k consecutive elements among these elements are sent, beginning
    at a random element. If fewer than k elements exceed the threshold, the remaining entries of the
    message are zeros.

    Cost: 8 bytes for each of the k elements.
    """

    type: Literal["topk"] = "topk"
    """The name that selects this codec in a config."""
    fraction: Fraction = 0.01
    """The fraction of the elements to send, above 0 and at most 1."""
    method: Literal["sampled", "exact"] = "sampled"
    """The selection of the elements: by a threshold from a sample (sampled), or by `jax.lax.top_k`
    (exact)."""

    exchange: ClassVar[Exchange] = "gather"

    def count(self, size: int) -> int:
        """Return the number k of elements to send from an array of `size` elements."""
        return max(1, round(self.fraction * size))

    def select(self, x: jax.Array, round: Round) -> tuple[Message, jax.Array]:
        flat = x.reshape(-1).astype(jnp.float32)
        count = self.count(flat.size)
        if self.method == "exact" or flat.size <= LEAST_SAMPLE:
            _, positions = lax.top_k(jnp.abs(flat), count)
            return positions.astype(jnp.uint32), flat[positions]
        positions, there = above_threshold(flat, count, round.own_key)
        return positions.astype(jnp.uint32), jnp.where(there, flat[positions], 0.0)

    def place(self, where: Message, values: jax.Array, like: Leaf, round: Round) -> jax.Array:
        return self._onto(jnp.zeros(like.shape, jnp.float32), where, values)

    def encode(self, x: jax.Array, state: CodecState, round: Round) -> tuple[Message, CodecState]:
        where, values = self.select(x, round)
        return {"positions": where, "values": to_words(values)}, state

    def decode(self, message: Message, like: Leaf, round: Round) -> jax.Array:
        values = from_words(message["values"], jnp.float32)
        return self.place(message["positions"], values, like, round)

    def add(self, total: jax.Array, message: Message, like: Leaf, round: Round) -> jax.Array:
        values = from_words(message["values"], jnp.float32)
        return self._onto(total, message["positions"], values)

    def _onto(self, total: jax.Array, where: jax.Array, values: jax.Array) -> jax.Array:
        # Values are added instead of set, since unused entries have position 0 and the value 0.
        flat = total.reshape(-1).at[where.astype(jnp.int32)].add(values)
        return flat.reshape(total.shape)


def above_threshold(flat: jax.Array, count: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the positions of `count` elements above a sampled threshold.

    The elements are not sorted. A pass over all elements packs a bit for each element into words:
    whether the element is above the threshold. Each entry of the result then finds its bit by a
    binary search in the cumulative counts of the words' bits. The bits of a word are from 32
    different rows, so that whole rows can be shifted and joined.

    Args:
      flat: the elements, [n].
      count: the number of positions.
      key: the random key.

    Returns:
      The positions, int32 [count], and a flag for each position. A flag is false if there are not
      enough elements above the threshold. The position is then 0.
    """
    sample_key, start_key = jax.random.split(key)
    large = jnp.abs(flat) >= _threshold(flat, count, sample_key)
    words = _packed(large)
    ends = jnp.cumsum(lax.population_count(words).astype(jnp.int32))
    found = ends[-1]
    start = jax.random.randint(start_key, (), 0, jnp.maximum(found - count, 0) + 1)
    slots = jnp.arange(count, dtype=jnp.int32)
    there = slots < found
    # Unused entries search for the first bit, and `select` sets the values of unused entries to 0.
    ordinal = jnp.where(there, start + slots, 0)
    # `ends[i]` is the number of set bits up to the end of word i, so the wanted bit is in the first
    # word whose `ends` is larger than `ordinal`.
    word = jnp.searchsorted(ends, ordinal, side="right").astype(jnp.int32)
    within = ordinal - jnp.where(word > 0, ends[word - 1], 0)
    row = _bit_at(words[word], within)
    position = word // LANES * (WORD * LANES) + row * LANES + word % LANES
    return jnp.where(there, position, 0), there


def _threshold(flat: jax.Array, count: int, key: jax.Array) -> jax.Array:
    size = min(flat.size, max(LEAST_SAMPLE, math.ceil(HITS * flat.size / count)))
    stride = flat.size // size
    offset = jax.random.randint(key, (), 0, stride)
    # The sampled positions begin at random and have equal distances, so the sample is a slice.
    # Random positions would need a gather.
    columns = flat[: size * stride].reshape(size, stride)
    sample = jnp.abs(lax.dynamic_slice_in_dim(columns, offset, 1, axis=1)[:, 0])
    rank = max(1, round(count * size / flat.size))
    return lax.top_k(sample, rank)[0][-1]


def _packed(flags: jax.Array) -> jax.Array:
    """Pack flags as bits into uint32 words, where bit r of a word is from row r of 32 rows."""
    padding = -flags.size % (WORD * LANES)
    rows = jnp.pad(flags, (0, padding)).reshape(-1, WORD, LANES)
    words = rows[:, 0].astype(jnp.uint32)
    for row in range(1, WORD):
        words = words | (rows[:, row].astype(jnp.uint32) << row)
    return words.reshape(-1)


def _bit_at(words: jax.Array, ordinal: jax.Array) -> jax.Array:
    """Return the position of the set bit that has the index `ordinal` among a word's set bits."""
    # This is a binary search: each iteration halves the range of bits that contains the wanted bit.
    place = jnp.zeros_like(ordinal)
    for width in (16, 8, 4, 2, 1):
        low = (words >> place.astype(jnp.uint32)) & jnp.uint32(2**width - 1)
        below = lax.population_count(low).astype(jnp.int32)
        beyond = ordinal >= below
        ordinal = ordinal - jnp.where(beyond, below, 0)
        place = place + jnp.where(beyond, width, 0)
    return place
