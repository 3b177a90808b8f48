"""Attention block by block in plain jax, on any device, in memory linear in the sequence.

A scan runs over the pairs (block of queries, block of keys) in which a query sees a key; pairs
hidden by causality or the window are left out. The forward pass keeps a running maximum and sum of
each query's softmax (Rabe and Staats 2021, arXiv 2112.05682); the backward pass recomputes the
scores from the logarithm of the final sum (Dao 2023, arXiv 2307.08691, algorithm 2).

Dims: B batch, L sequence, H heads, K kv_heads, G = H / K, d head_dim; N blocks of S positions each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.models.attention.contract import KEPT, Kernel, Qkv
from jaxdist.models.attention.softmax import (
    HIDDEN,
    Grads,
    Queries,
    RunningSoftmax,
    cut_blocks,
    einsum,
    join_blocks,
)
from jaxdist.models.hints import Hint

MOST = 256
"""The largest number of positions in a block, unless a caller sets another."""


@dataclass(frozen=True)
class Blockwise(Kernel):
    """Attention in blocks, in plain jax.

    Attributes:
      most: the largest number of positions in a block.
    """

    most: int = MOST

    def __call__(self, given: Qkv, *, window: int | None, causal: bool, hint: Hint) -> jax.Array:
        """Compute attention, as `Kernel` specifies.

        The backward pass needs the operands, the result, and one float for each query and head.
        """
        del hint
        length = given.q.shape[1]
        blocks = -(-length // self.most)
        size = -(-length // (8 * blocks)) * 8
        # The padding is at the end, where causality hides it from every query of the sequence;
        # without causality, `Blocks` hides it.
        padded = jax.tree.map(lambda x: _filled(x, blocks * size), given)
        out: Any = _attention(Blocks(blocks, size, window, None if causal else length), padded)
        return out[:, :length]


def _filled(x: jax.Array, length: int) -> jax.Array:
    missing = length - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)]) if missing else x


Segments = jax.Array
"""The document number of each position, cut into blocks: int32 `[N, B, S]`."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of a sequence, and the pairs of blocks in which a query sees a key.

    Attributes:
      count: the number of blocks.
      size: the number of positions in a block.
      window: see `AttentionRequest`.
      both_ways: the number of positions that are not padding, or None for causal attention, in
        which a query sees no later position.
    """

    count: int
    size: int
    window: int | None
    both_ways: int | None = None

    def pairs(self) -> tuple[jax.Array, jax.Array]:
        """Return the pairs of blocks in which a query sees a key.

        The results are the indices of the blocks of queries, and the indices of the blocks of keys,
        each int32 `[pairs]`.

        >>> [pair.tolist() for pair in Blocks(3, 4, window=1).pairs()]
        [[0, 1, 1, 2, 2], [0, 0, 1, 1, 2]]
        """
        found = np.array([(i, j) for i in range(self.count) for j in self._seen_by(i)], np.int32)
        return jnp.asarray(found[:, 0]), jnp.asarray(found[:, 1])

    def _seen_by(self, i: int) -> Iterator[int]:
        reach = self.count * self.size if self.window is None else self.window
        last = i
        if self.both_ways is not None:
            last = min((i + 1) * self.size - 1 + reach, self.count * self.size - 1) // self.size
        yield from range(max(0, i * self.size - reach) // self.size, last + 1)

    def scores(
        self, q: jax.Array, k: jax.Array, i: jax.Array, j: jax.Array, segments: Segments | None
    ) -> jax.Array:
        """Return the scores `[B, K, G S, S]` of block i's queries with block j's keys, in float32.

        Queries are `[B, K, G S, d]`, and keys `[B, K, S, d]`.
        """
        scores = einsum("bkrd,bksd->bkrs", q, k) * q.shape[-1] ** -0.5
        by_position = scores.reshape(*scores.shape[:2], -1, self.size, self.size)
        seen = self._seen(i, j, segments)
        return jnp.where(seen, by_position, HIDDEN).reshape(scores.shape)

    def _seen(self, i: jax.Array, j: jax.Array, segments: Segments | None) -> jax.Array:
        """Return which keys of block j each query of block i sees, bool `[B or 1, 1, 1, S, S]`."""
        within = jnp.arange(self.size)
        distance = (i - j) * self.size + within[:, None] - within[None, :]
        if self.both_ways is None:
            seen = distance >= 0
        else:
            seen = jnp.broadcast_to(j * self.size + within < self.both_ways, distance.shape)
        if self.window is not None:
            seen &= jnp.abs(distance) <= self.window
        seen = seen[None, None, None]
        if segments is not None:
            ours, theirs = segments[i], segments[j]
            seen = seen & (ours[:, :, None] == theirs[:, None, :])[:, None, None]
        return seen

    def cut_segments(self, segments_BL: jax.Array | None) -> Segments | None:
        """Cut document numbers `[B, L]` into blocks `[N, B, S]`, or return None for None."""
        if segments_BL is None:
            return None
        return segments_BL.reshape(-1, self.count, self.size).transpose(1, 0, 2)


Residuals = tuple[Qkv, jax.Array, jax.Array]
"""The values for the backward pass: the operands, the result, and for each query the logarithm of
its sum of weights."""


def _joined(blocks: Blocks, x: jax.Array, like: jax.Array) -> jax.Array:
    return join_blocks(x, blocks.size, like.shape[2]).reshape(like.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(blocks: Blocks, given: Qkv) -> jax.Array:
    return _forward(blocks, given)[0]


def _forward(blocks: Blocks, given: Qkv) -> tuple[jax.Array, Residuals]:
    *qkv, segments_BL = given
    q, k, v = (cut_blocks(x, blocks.size, given.k.shape[2]) for x in qkv)
    segments = blocks.cut_segments(segments_BL)

    def body(
        rows: RunningSoftmax, pair: tuple[jax.Array, jax.Array]
    ) -> tuple[RunningSoftmax, None]:
        i, j = pair
        return rows.seeing(i, blocks.scores(q[i], k[j], i, j, segments), v[j]), None

    rows, _ = lax.scan(body, RunningSoftmax.start(q), blocks.pairs())
    # The total is never 0. A query of the sequence sees its own position. A query of the padding
    # sees positions of the sequence, or if a window hides all of them, has equal weights for all
    # hidden keys. The results of the padding are never used.
    found = (rows.out / rows.total[..., None]).astype(q.dtype)
    out_BLHd = checkpoint_name(_joined(blocks, found, given.q), KEPT)
    log_total = checkpoint_name(rows.top + jnp.log(rows.total), KEPT)
    return out_BLHd, (given, out_BLHd, log_total)


def _backward(blocks: Blocks, kept: Residuals, cotangent_BLHd: jax.Array) -> tuple[Any]:
    given, out_BLHd, log_total = kept
    *qkv, segments_BL = given
    arrays = (*qkv, out_BLHd, cotangent_BLHd)
    q, k, v, out, dout = (cut_blocks(x, blocks.size, given.k.shape[2]) for x in arrays)
    segments = blocks.cut_segments(segments_BL)
    queries = Queries.of_result(q, out, dout, log_total)

    def body(grads: Grads, pair: tuple[jax.Array, jax.Array]) -> tuple[Grads, None]:
        i, j = pair
        found = queries.grads(i, blocks.scores(q[i], k[j], i, j, segments), k[j], v[j])
        dq, dk, dv = grads
        new = dq.at[i].add(found[0]), dk.at[j].add(found[1]), dv.at[j].add(found[2])
        return new, None

    dq, dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    grads, _ = lax.scan(body, (dq, dk, dv), blocks.pairs())
    found = (_joined(blocks, g.astype(x.dtype), x) for g, x in zip(grads, qkv, strict=True))
    return (Qkv(*found),)


_attention.defvjp(_forward, _backward)
