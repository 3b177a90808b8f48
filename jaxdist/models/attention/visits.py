"""The blocks of keys that a device's queries see, where several devices share a sequence.

A device has a piece of the sequence: one chunk of consecutive positions (contiguous order), two
(zigzag), or every R-th position (striped). After t of R hops it has the keys of the group t before
its own, counted round the ring. `visits` lists the pairs of a block of its queries and a block of
those keys in which a query sees a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.cost.context import Order
from jaxdist.models.attention.softmax import HIDDEN, einsum

Array = jax.Array
LEAST = 64
"""The least size of a block for which a chunk of the sequence is not padded to whole blocks."""


class BlockPairs(NamedTuple):
    """Pairs of blocks, each of which a group's queries see where `live` holds.

    Attributes:
      i, j: block of queries, block of keys, int32 `[pairs]`.
      distance: number of positions from the first of block j to the first of block i.
      live: whether this group sees any of the pairs, or None if it always does.
    """

    i: jax.Array
    j: jax.Array
    distance: jax.Array
    live: jax.Array | None = None


@dataclass(frozen=True)
class Pieces:
    """The pieces of a sequence over R groups, and the blocks of each.

    Attributes:
      order: the order of positions over the groups; other than contiguous is causal, and without a
        window.
      groups: number of groups, R.
      chunk: positions of a chunk of a piece.
      size: positions of a block.
      window, causal: as in `AttentionRequest`.
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
        """Divide pieces of `length` positions into blocks of at most `most`."""
        chunk = length // 2 if order == "zigzag" else length
        size = max(n for n in range(1, min(most, chunk) + 1) if chunk % n == 0)
        if size < min(LEAST, chunk, most):
            count = -(-chunk // most)
            size = -(-chunk // (8 * count)) * 8
        return cls(order, groups, chunk, size, window, causal)

    @property
    def chunks(self) -> int:
        """The number of chunks of a piece."""
        return 2 if self.order == "zigzag" else 1

    @property
    def blocks(self) -> int:
        """The number of blocks of a chunk."""
        return -(-self.chunk // self.size)

    @property
    def stride(self) -> int:
        """The distance between neighbours in a chunk."""
        return self.groups if self.order == "striped" else 1

    def hops(self) -> list[int]:
        """Return the hops after which a group sees any keys, 0 for its own."""
        return [
            t for t in range(self.groups) if self.visits(t, jnp.int32(self.groups - 1)) or not t
        ]

    def visits(self, t: int, group: jax.Array) -> list[BlockPairs]:
        """Return what `group` visits after t hops; the shapes do not depend on the group."""
        return {"contiguous": self._contiguous, "zigzag": self._zigzag, "striped": self._striped}[
            self.order
        ](t, group)

    def _contiguous(self, t: int, group: jax.Array) -> list[BlockPairs]:
        ahead = (t - self.groups) * self.chunk  # The keys came round the ring, from later groups.
        near = self._seen(t * self.chunk, None if t == 0 else group >= t)
        return [*near, *(() if self.causal or t == 0 else self._seen(ahead, group < t))]

    def _seen(self, offset: int, live: jax.Array | None) -> Iterator[BlockPairs]:
        """Visit the blocks that are seen of keys that lie `offset` before the queries."""
        i, j = self._pairs(lambda i, j: self._sees(offset + (i - j) * self.size))
        if i.size:
            yield BlockPairs(
                jnp.asarray(i), jnp.asarray(j), jnp.asarray(offset + (i - j) * self.size), live
            )

    def _sees(self, distance: int) -> bool:
        """Whether a query sees a key in blocks whose first positions are `distance` apart."""
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
        """Visit the same number of blocks for each group, with chunks g and 2R - 1 - g."""
        R, m = self.groups, self.blocks
        i, j = self._pairs(lambda i, j: True)
        within = jnp.asarray((i - j) * self.size)
        source = (group - t) % R
        # The later chunk of queries is behind the earlier chunk of all keys.
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
        # Of keys of an earlier group both chunks of queries see the first, of those of a later
        # group the second chunk of queries sees both.
        earlier = group >= t
        step = jnp.where(earlier, 0, m)
        distance = jnp.where(earlier, t, R - t) * self.chunk + within
        return [*found, BlockPairs(jnp.asarray(i) + step, jnp.asarray(j) + step, distance)]

    def scores(
        self, q: Array, k: Array, visit: BlockPairs, segments: tuple[Array, Array] | None
    ) -> Array:
        """Score queries `[B, K, G S, d]` of a block with keys `[B, K, S, d]`, in float32.

        Args:
          visit: a single pair.
          segments: documents of the queries and of the keys, `[B, S]`.
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
        """Cut a piece into `[N, B, K, G S, d]`; queries that share keys are rows of one matrix."""
        B, _, H, d = x_BlHd.shape
        x = self._padded(x_BlHd).reshape(B, -1, self.size, kv_heads, H // kv_heads, d)
        return x.transpose(1, 0, 3, 4, 2, 5).reshape(x.shape[1], B, kv_heads, -1, d)

    def _padded(self, x: Array) -> Array:
        """Fill up each chunk with zeros to whole blocks, `[B, chunks, blocks * S, ...]`."""
        x = x.reshape(x.shape[0], self.chunks, self.chunk, *x.shape[2:])
        missing = self.blocks * self.size - self.chunk
        return jnp.pad(x, [(0, 0), (0, 0), (0, missing), *[(0, 0)] * (x.ndim - 3)])

    def joined(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Invert `cut`, to the shape `[B, l, H, d]`."""
        B, _, H, d = shape
        x = x.reshape(-1, B, x.shape[2], H // x.shape[2], self.size, d).transpose(1, 0, 4, 2, 3, 5)
        return x.reshape(B, self.chunks, -1, H, d)[:, :, : self.chunk].reshape(shape)

    def cut_segments(self, segments_Bl: Array | None) -> Array | None:
        """Cut documents into blocks, `[N, B, S]`."""
        if segments_Bl is None:
            return None
        x = self._padded(segments_Bl)
        return x.reshape(x.shape[0], -1, self.size).transpose(1, 0, 2)
