"""Attention block by block in plain jax, on any device, in memory linear in the sequence.

A scan goes over the pairs (block of queries, block of keys) that see each other; pairs that
causality or the window hides are left out. The forward pass keeps a running maximum and sum of each
query's softmax (Rabe and Staats 2021, arXiv 2112.05682); the backward pass computes the scores
again from the logarithm of that sum (Dao 2023, arXiv 2307.08691, algorithm 2).

Dims: B batch, L sequence, H heads, K kv_heads, G = H / K, d head_dim; N blocks of S positions each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.models.attention.contract import KEPT, Ask
from jaxdist.models.layers import Hint

MOST = 256
"""Positions of the largest block."""
HIDDEN = -0.7 * float(np.finfo(np.float32).max)
"""Score of a key that a query does not see: finite, for a row that sees nothing yet."""


@dataclass(frozen=True)
class Blockwise:
    """Attention in blocks by plain jax.

    Attributes:
      most: positions of the largest block.
    """

    most: int = MOST
    platform: str | None = field(default=None, init=False)

    def fits(self, ask: Ask) -> str | None:
        """Always: it is written in plain jax."""
        del ask
        return None

    def __call__(
        self,
        q_BLHd: jax.Array,
        k_BLKd: jax.Array,
        v_BLKd: jax.Array,
        segments_BL: jax.Array | None,
        *,
        window: int | None,
        hint: Hint,
    ) -> jax.Array:
        """See the contract. Kept for the backward pass: the operands, the result, a float a row."""
        del hint
        length = q_BLHd.shape[1]
        blocks = -(-length // self.most)
        size = -(-length // (8 * blocks)) * 8
        # Filled up at the end, where no query of the sequence looks.
        given = [_filled(x, blocks * size) for x in (q_BLHd, k_BLKd, v_BLKd)]
        if segments_BL is not None:
            segments_BL = _filled(segments_BL, blocks * size)
        return _attention(Blocks(blocks, size, window), *given, segments_BL)[:, :length]


def _filled(x: jax.Array, length: int) -> jax.Array:
    missing = length - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)]) if missing else x


@dataclass(frozen=True)
class Blocks:
    """A sequence in `count` blocks of `size` positions; `window` as in the contract."""

    count: int
    size: int
    window: int | None

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Blocks of queries and of keys that see each other, int32 `[pairs]` each.

        >>> [pair.tolist() for pair in Blocks(3, 4, window=1).pairs()]
        [[0, 1, 1, 2, 2], [0, 0, 1, 1, 2]]
        """
        found = np.array([(i, j) for i in range(self.count) for j in self._seen_by(i)], np.int32)
        return found[:, 0], found[:, 1]

    def _seen_by(self, i: int) -> Iterator[int]:
        reach = self.count * self.size if self.window is None else self.window
        yield from range(max(0, i * self.size - reach) // self.size, i + 1)

    def seen(self, i: jax.Array, j: jax.Array, segments: Segments | None) -> jax.Array:
        """Which keys of block j each query of block i sees, bool `[B or 1, 1, 1, S, S]`."""
        within = jnp.arange(self.size)
        distance = (i - j) * self.size + within[:, None] - within[None, :]
        seen = distance >= 0
        if self.window is not None:
            seen &= distance <= self.window
        seen = seen[None, None, None]
        if segments is not None:
            ours, theirs = segments[i], segments[j]
            seen = seen & (ours[:, :, None] == theirs[:, None, :])[:, None, None]
        return seen


Segments = jax.Array
"""int32 `[N, B, S]`."""


class Rows(NamedTuple):
    """What is known of each query after some of its keys: float32.

    Attributes:
      out: `[N, B, K, G S, d]`, the sum of values by weight.
      top: `[N, B, K, G S]`, the largest score.
      total: `[N, B, K, G S]`, the sum of weights.
    """

    out: jax.Array
    top: jax.Array
    total: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    blocks: Blocks,
    q_BLHd: jax.Array,
    k_BLKd: jax.Array,
    v_BLKd: jax.Array,
    segments_BL: jax.Array | None,
) -> jax.Array:
    return _forward(blocks, q_BLHd, k_BLKd, v_BLKd, segments_BL)[0]


def _forward(blocks, q_BLHd, k_BLKd, v_BLKd, segments_BL):
    K = k_BLKd.shape[2]
    q, k, v = (_cut(blocks, x, K) for x in (q_BLHd, k_BLKd, v_BLKd))
    segments = _segments(blocks, segments_BL)

    def body(rows, pair):
        i, j = pair
        own = Rows(*(lax.dynamic_index_in_dim(x, i, keepdims=False) for x in rows))
        scores = _scores(blocks, q[i], k[j], i, j, segments)
        top = jnp.maximum(own.top, scores.max(-1))
        weights = jnp.exp(scores - top[..., None])
        kept = jnp.exp(own.top - top)
        new = Rows(
            own.out * kept[..., None] + _dot("bkrs,bksd->bkrd", weights.astype(v.dtype), v[j]),
            top,
            own.total * kept + weights.sum(-1),
        )
        return Rows(*(lax.dynamic_update_index_in_dim(x, y, i, 0) for x, y in zip(rows, new))), None

    start = Rows(
        jnp.zeros(q.shape, jnp.float32),
        jnp.full(q.shape[:-1], HIDDEN, jnp.float32),
        jnp.zeros(q.shape[:-1], jnp.float32),
    )
    rows, _ = lax.scan(body, start, blocks.pairs())
    out = _joined(blocks, (rows.out / rows.total[..., None]).astype(q.dtype), q_BLHd.shape)
    log_total = rows.top + jnp.log(rows.total)
    out, log_total = (checkpoint_name(x, KEPT) for x in (out, log_total))
    return out, (q_BLHd, k_BLKd, v_BLKd, segments_BL, out, log_total)


def _backward(blocks, kept, cotangent):
    q_BLHd, k_BLKd, v_BLKd, segments_BL, out_BLHd, log_total = kept
    K = k_BLKd.shape[2]
    q, k, v, out, dout = (_cut(blocks, x, K) for x in (q_BLHd, k_BLKd, v_BLKd, out_BLHd, cotangent))
    segments = _segments(blocks, segments_BL)
    delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)

    def body(grads, pair):
        i, j = pair
        dq, dk, dv = grads
        weights = jnp.exp(_scores(blocks, q[i], k[j], i, j, segments) - log_total[i][..., None])
        dweights = _dot("bkrd,bksd->bkrs", dout[i], v[j])
        dscores = (weights * (dweights - delta[i][..., None]) * q.shape[-1] ** -0.5).astype(q.dtype)
        return (
            dq.at[i].add(_dot("bkrs,bksd->bkrd", dscores, k[j])),
            dk.at[j].add(_dot("bkrs,bkrd->bksd", dscores, q[i])),
            dv.at[j].add(_dot("bkrs,bkrd->bksd", weights.astype(q.dtype), dout[i])),
        ), None

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    grads, _ = lax.scan(body, start, blocks.pairs())
    like = (q_BLHd, k_BLKd, v_BLKd)
    return (
        *(_joined(blocks, g.astype(x.dtype), x.shape) for g, x in zip(grads, like, strict=True)),
        None,
    )


_attention.defvjp(_forward, _backward)


def _scores(blocks, q, k, i, j, segments):
    S = blocks.size
    scores = _dot("bkrd,bksd->bkrs", q, k) * q.shape[-1] ** -0.5
    B, K, R, _ = scores.shape
    seen = blocks.seen(i, j, segments)
    return jnp.where(seen, scores.reshape(B, K, R // S, S, S), HIDDEN).reshape(B, K, R, S)


def _dot(dims, a, b):
    return jnp.einsum(dims, a, b, preferred_element_type=jnp.float32)


def _cut(blocks, x_BLHd, kv_heads):
    """`[B, L, H, d]` as `[N, B, K, G S, d]`: the queries that share keys are rows of one matrix."""
    B, _, H, d = x_BLHd.shape
    x = x_BLHd.reshape(B, blocks.count, blocks.size, kv_heads, H // kv_heads, d)
    return x.transpose(1, 0, 3, 4, 2, 5).reshape(blocks.count, B, kv_heads, -1, d)


def _joined(blocks, x, shape):
    B, L, H, d = shape
    K = x.shape[2]
    x = x.reshape(blocks.count, B, K, H // K, blocks.size, d)
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(shape)


def _segments(blocks, segments_BL):
    if segments_BL is None:
        return None
    B = segments_BL.shape[0]
    return segments_BL.reshape(B, blocks.count, blocks.size).transpose(1, 0, 2)
