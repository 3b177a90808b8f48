"""The running softmax and the gradients of attention that is computed block by block.

Dims: B batch, H heads, K kv_heads, G = H / K, d head_dim; N blocks of S positions each.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

HIDDEN = -0.7 * float(np.finfo(np.float32).max)
"""The score of a key that a query does not see.

The score is finite, so that the sums of a query that has not yet seen a key are not NaN. All
weights of such a query are 1. The first visible keys, of which s is the largest score, then
multiply the sums by exp(HIDDEN - s) = 0.
"""

Grads = tuple[jax.Array, jax.Array, jax.Array]


class RunningSoftmax(NamedTuple):
    """The running softmax of each query over the keys so far, in float32.

    Attributes:
      out: the weighted sum of values, `[N, B, K, G S, d]`.
      top: the largest score, `[N, B, K, G S]`.
      total: the sum of weights, `[N, B, K, G S]`.
    """

    out: jax.Array
    top: jax.Array
    total: jax.Array

    @classmethod
    def start(cls, q: jax.Array) -> RunningSoftmax:
        """Return the state for queries `[N, B, K, G S, d]` that have not yet seen a key."""
        return cls(
            out=jnp.zeros(q.shape, jnp.float32),
            top=jnp.full(q.shape[:-1], HIDDEN, jnp.float32),
            total=jnp.zeros(q.shape[:-1], jnp.float32),
        )

    def seeing(self, i: jax.Array, scores: jax.Array, v: jax.Array) -> RunningSoftmax:
        """Return the state after block i's queries have seen a block of keys.

        Args:
          i: the index of the block of queries.
          scores: the scores of the queries with the keys, `[B, K, G S, S]`.
          v: the values of the keys, `[B, K, S, d]`.
        """
        own = RunningSoftmax(*(x[i] for x in self))
        top = jnp.maximum(own.top, scores.max(-1))
        weights, kept = jnp.exp(scores - top[..., None]), jnp.exp(own.top - top)
        values = einsum("bkrs,bksd->bkrd", weights.astype(v.dtype), v)
        out = own.out * kept[..., None] + values
        new = RunningSoftmax(out, top, own.total * kept + weights.sum(-1))
        return RunningSoftmax(*(x.at[i].set(y) for x, y in zip(self, new, strict=True)))


class Queries(NamedTuple):
    """The queries of a block, or of all blocks, with the values for their backward pass.

    Attributes:
      q: the queries.
      dout: the gradients of the queries' results.
      log_total: the logarithm of each query's sum of weights.
      delta: for each query, the sum over features of its result times the result's gradient.
    """

    q: jax.Array
    dout: jax.Array
    log_total: jax.Array
    delta: jax.Array

    @classmethod
    def of_result(
        cls, q: jax.Array, out: jax.Array, dout: jax.Array, log_total: jax.Array
    ) -> Queries:
        """Return the queries with `delta`, which follows from the results and their gradients.

        Args:
          out: the results of the queries.
          dout: the gradients of the results.
        """
        # The gradient of a softmax needs the sum over all keys of weights times `dweights`. This
        # sum equals the product of the result and its gradient, so that no second pass over the
        # keys is needed.
        delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)
        return cls(q, dout, log_total, delta)

    def grads(self, i: jax.Array, scores: jax.Array, k: jax.Array, v: jax.Array) -> Grads:
        """Return the gradients of block i's queries, and of a block of keys and values.

        Args:
          scores: the scores of these queries with these keys.
        """
        q, dout, log_total, delta = (x[i] for x in self)
        weights = jnp.exp(scores - log_total[..., None])
        dweights = einsum("bkrd,bksd->bkrs", dout, v)
        dscores = weights * (dweights - delta[..., None]) * q.shape[-1] ** -0.5
        weights, dscores = weights.astype(q.dtype), dscores.astype(q.dtype)
        return (
            einsum("bkrs,bksd->bkrd", dscores, k),
            einsum("bkrs,bkrd->bksd", dscores, q),
            einsum("bkrs,bkrd->bksd", weights, dout),
        )


def einsum(dims: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Compute `jnp.einsum` of two arrays, with sums in float32."""
    return jnp.einsum(dims, a, b, preferred_element_type=jnp.float32)


def cut_blocks(x: jax.Array, size: int, kv_heads: int) -> jax.Array:
    """Cut an array `[B, ..., H, d]` into blocks of `size` positions, `[N, B, K, G S, d]`.

    There are N blocks of S positions, B examples, and K heads of keys. At each position, the G
    queries that share a key are rows of one matrix, so a block has G S rows for each head of keys.
    """
    B, (H, d) = len(x), x.shape[-2:]
    x = x.reshape(B, -1, size, kv_heads, H // kv_heads, d)
    return x.transpose(1, 0, 3, 4, 2, 5).reshape(x.shape[1], B, kv_heads, -1, d)


def join_blocks(x: jax.Array, size: int, heads: int) -> jax.Array:
    """Return the blocks of `cut_blocks` with their dims in the order `[B, N, S, K, G, d]`."""
    x = x.reshape(*x.shape[:3], heads // x.shape[2], size, x.shape[-1])
    return x.transpose(1, 0, 4, 2, 3, 5)
