"""The blocks of keys that a device's queries see, where several devices share a sequence.

The devices form R groups, and each group has a *piece* of the sequence: one chunk of consecutive
positions (contiguous order), two chunks (zigzag), or every R-th position (striped). After t hops,
group g has the keys of group (g - t) % R. `visits` lists the pairs of a block of queries and a
block of keys in which a query sees a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.cost.context import Order
from jaxdist.models.attention.softmax import HIDDEN, cut_blocks, einsum, join_blocks

Array = jax.Array
LEAST = 64
"""The smallest size of blocks that divide a chunk exactly; if only smaller blocks divide the chunk,
the chunk is padded to larger blocks."""


class BlockPairs(NamedTuple):
    """The pairs of a block of queries and a block of keys that a group of devices may visit.

    Attributes:
      i, j: the indices of the blocks of queries and of the blocks of keys, int32 `[pairs]`.
      distance: the number of positions from the first position of block j to the first position
        of block i.
      live: whether this group visits these pairs, a bool scalar, or None if every group visits
        these pairs.
    """

    i: jax.Array
    j: jax.Array
    distance: jax.Array
    live: jax.Array | None = None


@dataclass(frozen=True)
class Pieces:
    """The pieces into which R groups divide a sequence, and the blocks of each piece.

    Attributes:
      order: the order of positions over the groups; only the contiguous order supports windows
        and attention that is not causal.
      groups: the number of groups, R.
      chunk: the number of positions in a chunk.
      size: the number of positions in a block.
      window, causal: see `AttentionRequest`.
    """

    order: Order
    groups: int
    chunk: int
    size: int
    window: int | None
    causal: bool

    @classmethod
    def of(
        cls, order: Order, groups: int, length: int, most: int, window: int | None, *, causal: bool
    ) -> Pieces:
        """Return pieces of `length` positions each, with blocks of at most `most` positions."""
        chunk = length // 2 if order == "zigzag" else length
        size = max(n for n in range(1, min(most, chunk) + 1) if chunk % n == 0)
        if size < min(LEAST, chunk, most):
            count = -(-chunk // most)
            size = -(-chunk // (8 * count)) * 8
        return cls(order, groups, chunk, size, window, causal)

    @property
    def chunks(self) -> int:
        """The number of chunks of the sequence that a device has as its piece."""
        return 2 if self.order == "zigzag" else 1

    @property
    def blocks(self) -> int:
        """The number of blocks of a chunk."""
        return -(-self.chunk // self.size)

    @property
    def stride(self) -> int:
        """The distance in the sequence between neighboring positions of a chunk."""
        return self.groups if self.order == "striped" else 1

    def hops(self) -> list[int]:
        """Return the numbers of hops after which some group sees a key, beginning with 0."""
        return [
            t for t in range(self.groups) if self.visits(t, jnp.int32(self.groups - 1)) or not t
        ]

    def visits(self, t: int, group: jax.Array) -> list[BlockPairs]:
        """Return the pairs of blocks that `group` visits after t hops.

        The shapes of the result do not depend on the group.
        """
        return {"contiguous": self._contiguous, "zigzag": self._zigzag, "striped": self._striped}[
            self.order
        ](t, group)

    def _contiguous(self, t: int, group: jax.Array) -> list[BlockPairs]:
        ahead = (t - self.groups) * self.chunk  # Keys of a later group have this negative offset.
        near = self._seen(t * self.chunk, None if t == 0 else group >= t)
        return [*near, *(() if self.causal or t == 0 else self._seen(ahead, group < t))]

    def _seen(self, offset: int, live: jax.Array | None) -> Iterator[BlockPairs]:
        """Yield the visible pairs of blocks for keys that are `offset` positions before queries."""
        i, j = self._pairs(lambda i, j: self._sees(offset + (i - j) * self.size))
        if i.size:
            yield BlockPairs(
                jnp.asarray(i), jnp.asarray(j), jnp.asarray(offset + (i - j) * self.size), live
            )

    def _sees(self, distance: int) -> bool:
        """Return whether any query of a block sees a key of another block.

        Args:
          distance: the number of positions from the first key to the first query.
        """
        reach = self.size - 1
        behind = -distance if self.causal else -distance - (self.window or self.chunk * self.groups)
        return behind <= reach and (self.window is None or distance - reach <= self.window)

    def _pairs(self, keep: Callable[[int, int], bool]) -> tuple[np.ndarray, np.ndarray]:
        each = range(self.blocks)
        found = np.array([(i, j) for i in each for j in each if keep(i, j)], np.int32).reshape(
            -1, 2
        )
        return found[:, 0], found[:, 1]

    def _striped(self, t: int, group: jax.Array) -> list[BlockPairs]:
        i, j = self._pairs(lambda i, j: j <= i)
        offset = jnp.where(group >= t, t, t - self.groups)
        distance = jnp.asarray((i - j) * self.size * self.stride) + offset
        return [BlockPairs(jnp.asarray(i), jnp.asarray(j), distance)]

    def _zigzag(self, t: int, group: jax.Array) -> list[BlockPairs]:
        """Return the visits of a group in zigzag order; every group has the same number of visits.

        Group g has the chunks g and 2R - 1 - g of the sequence.
        """
        R, m = self.groups, self.blocks
        i, j = self._pairs(lambda i, j: True)
        within = jnp.asarray((i - j) * self.size)
        source = (group - t) % R
        # The second chunk of every group is later in the sequence than the first chunk of any
        # group. The queries of a second chunk therefore see all keys of a first chunk.
        found = [
            BlockPairs(
                jnp.asarray(m + i),
                jnp.asarray(j),
                (2 * R - 1 - group - source) * self.chunk + within,
            )
        ]
        if t == 0:
            i, j = self._pairs(lambda i, j: j <= i)
            within = jnp.asarray((i - j) * self.size)
            both = (BlockPairs(jnp.asarray(i + n), jnp.asarray(j + n), within) for n in (0, m))
            return [*both, *found]
        # If the keys are from an earlier group, both chunks of queries see the first chunk of keys.
        # If the keys are from a later group, the second chunk of queries sees both chunks of keys.
        earlier = group >= t
        step = jnp.where(earlier, 0, m)
        distance = jnp.where(earlier, t, R - t) * self.chunk + within
        return [*found, BlockPairs(jnp.asarray(i) + step, jnp.asarray(j) + step, distance)]

    def scores(
        self, q: Array, k: Array, visit: BlockPairs, segments: tuple[Array, Array] | None
    ) -> Array:
        """Return the scores `[B, K, G S, S]` of a block of queries with a block of keys (float32).

        Args:
          q: the queries, `[B, K, G S, d]`.
          k: the keys, `[B, K, S, d]`.
          visit: the pair of these two blocks, with a scalar in each field.
          segments: the document numbers of the queries and of the keys, `[B, S]` each, or None if
            documents are not isolated.
        """
        scores = einsum("bkrd,bksd->bkrs", q, k) * q.shape[-1] ** -0.5
        by_position = scores.reshape(*scores.shape[:2], -1, self.size, self.size)
        within = jnp.arange(self.size)
        distance = visit.distance + self.stride * (within[:, None] - within[None, :])
        seen = (distance >= 0) if self.causal else jnp.full(distance.shape, True)
        if self.window is not None:
            seen &= jnp.abs(distance) <= self.window
        if self.chunk % self.size:
            seen &= (visit.j % self.blocks * self.size + within < self.chunk)[None, :]
        seen = seen[None, None, None]
        if segments is not None:
            ours, theirs = segments
            seen = seen & (ours[:, :, None] == theirs[:, None, :])[:, None, None]
        return jnp.where(seen, by_position, HIDDEN).reshape(scores.shape)

    def cut(self, x_BlHd: Array, kv_heads: int) -> Array:
        """Cut a piece into blocks; see `cut_blocks`."""
        return cut_blocks(self._padded(x_BlHd), self.size, kv_heads)

    def _padded(self, x: Array) -> Array:
        """Pad each chunk with zeros to whole blocks, `[B, chunks, blocks * S, ...]`."""
        x = x.reshape(x.shape[0], self.chunks, self.chunk, *x.shape[2:])
        missing = self.blocks * self.size - self.chunk
        return jnp.pad(x, [(0, 0), (0, 0), (0, missing), *[(0, 0)] * (x.ndim - 3)])

    def joined(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Join the blocks of `cut` to a piece of the shape `[B, l, H, d]`."""
        B, _, H, d = shape
        x = join_blocks(x, self.size, H)
        return x.reshape(B, self.chunks, -1, H, d)[:, :, : self.chunk].reshape(shape)

    def cut_segments(self, segments_Bl: Array | None) -> Array | None:
        """Cut document numbers `[B, l]` into blocks `[N, B, S]`, or return None for None."""
        if segments_Bl is None:
            return None
        x = self._padded(segments_Bl)
        return x.reshape(x.shape[0], -1, self.size).transpose(1, 0, 2)
