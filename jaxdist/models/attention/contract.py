"""The contract of attention kernels: arguments, results, and refusals.

Dims: B batch, L sequence, H heads, K kv_heads, d head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import jax

from jaxdist.models.hints import Hint

KEPT = "attention"
"""The name (for `checkpoint_name`) of the values that kernels keep for the backward pass.

If a remat policy saves this name, the backward pass does not run the kernel a second time.
"""


@dataclass(frozen=True)
class AttentionRequest:
    """A request for attention, which a kernel may or may not support.

    Attributes:
      platform: the platform of the devices, as jax names it (cpu, gpu or tpu), or None if the
        platform is unknown.
      dtype: the dtype of the operands: float32 or bfloat16.
      heads: the number of query heads, over all devices.
      kv_heads: the number of key and value heads. heads / kv_heads query heads share a key head and
        a value head.
      head_dim: the number of features of a head.
      window: the number of earlier positions that a query sees; without causality, a query sees
        the same number of later positions. None sets no limit.
      segments: whether a query sees only the positions of its document.
      length: the length of a sequence, or None if the length is unknown.
      head_parts, kv_head_parts, seq_parts: the number of devices over which each of these dims is
        split.
      family: the short name of the devices, such as v5e; "" means unknown.
      causal: whether a query sees no later position.
    """

    platform: str | None
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    segments: bool = False
    length: int | None = None
    head_parts: int = 1
    kv_head_parts: int = 1
    seq_parts: int = 1
    family: str = ""
    causal: bool = True


class Qkv(NamedTuple):
    """The operands of attention: query head h reads key head h // (H / K).

    Attributes:
      q: the queries `[B, L, H, d]`.
      k, v: the keys and values `[B, L, K, d]`, in the dtype of the queries.
      segments: the document number of each position `[B, L]`, int32, or None if each sequence is
        a single document.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    segments: jax.Array | None = None


class Kernel(Protocol):
    """Grouped-query attention: softmax(q k^T / sqrt(d)) v.

    Position i sees position j if |i - j| <= window, i and j are in the same segment, and, with
    causality, j <= i. All kernels compute the same numbers, up to rounding.
    """

    platform: ClassVar[str | None] = None
    """The platform that the kernel is written for, or None if it runs on all platforms."""

    def fits(self, ask: AttentionRequest) -> str | None:
        """Return why the kernel does not support a request, or None if the kernel supports it.

        The reason is a clause without a subject, such as "runs on TPUs, but the mesh
        has gpu devices".
        """
        del ask
        return None

    def __call__(self, given: Qkv, *, window: int | None, causal: bool, hint: Hint) -> jax.Array:
        """Compute the attended values `[B, L, H, d]`, in q's dtype.

        Args:
          given: the queries, keys and values.
          window, causal: see `AttentionRequest`.
          hint: the layout of the queries, keys and values on the mesh.
        """
        ...
