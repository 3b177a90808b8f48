"""The running softmax of attention block by block, and its gradients.

Dims: B batch, H heads, K kv_heads, G = H / K, d head_dim; N blocks of S positions each.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

HIDDEN = -0.7 * float(np.finfo(np.float32).max)
"""Score of a key that a query does not see: finite, so that a row that sees no key yet is not NaN.
Such a row has weights of 1, which the factor exp(HIDDEN - top) = 0 of its first key removes."""

Grads = tuple[jax.Array, jax.Array, jax.Array]


class RunningSoftmax(NamedTuple):
    """The running softmax of each query over the keys so far, in float32.

    Attributes:
      out: `[N, B, K, G S, d]`, the weighted sum of values.
      top: `[N, B, K, G S]`, the largest score.
      total: `[N, B, K, G S]`, the sum of weights.
    """

    out: jax.Array
    top: jax.Array
    total: jax.Array

    @classmethod
    def start(cls, q: jax.Array) -> RunningSoftmax:
        """Return the softmax of queries `[N, B, K, G S, d]` that have seen no key."""
        return cls(
            out=jnp.zeros(q.shape, jnp.float32),
            top=jnp.full(q.shape[:-1], HIDDEN, jnp.float32),
            total=jnp.zeros(q.shape[:-1], jnp.float32),
        )

    def seeing(self, i: jax.Array, scores: jax.Array, v: jax.Array) -> RunningSoftmax:
        """Add keys with scores `[B, K, G S, S]` and values `[B, K, S, d]` to block i's softmax."""
        own = RunningSoftmax(*(x[i] for x in self))
        top = jnp.maximum(own.top, scores.max(-1))
        weights, kept = jnp.exp(scores - top[..., None]), jnp.exp(own.top - top)
        values = einsum("bkrs,bksd->bkrd", weights.astype(v.dtype), v)
        out = own.out * kept[..., None] + values
        new = RunningSoftmax(out, top, own.total * kept + weights.sum(-1))
        return RunningSoftmax(*(x.at[i].set(y) for x, y in zip(self, new, strict=True)))


class Queries(NamedTuple):
    """The queries of a block, or of all blocks, with what their backward pass needs.

    Attributes:
      q, dout: queries, and gradients of their results.
      log_total, delta: logarithm of the sum of weights, and sum of results times gradients.
    """

    q: jax.Array
    dout: jax.Array
    log_total: jax.Array
    delta: jax.Array

    @classmethod
    def of_result(
        cls, q: jax.Array, out: jax.Array, dout: jax.Array, log_total: jax.Array
    ) -> Queries:
        """Return the queries, given their results, the gradients of these, and `log_total`."""
        # The gradient of a softmax needs the sum over all keys of weights times `dweights`. That
        # sum is the product of the result and its gradient, which takes no other pass over keys.
        delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)
        return cls(q, dout, log_total, delta)

    def grads(self, i: jax.Array, scores: jax.Array, k: jax.Array, v: jax.Array) -> Grads:
        """Return the gradients of block i's queries and of a block of keys and values."""
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
    """Multiply and add up in float32."""
    return jnp.einsum(dims, a, b, preferred_element_type=jnp.float32)
