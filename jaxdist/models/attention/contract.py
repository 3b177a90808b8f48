"""The contract of attention kernels: arguments, results, and refusals.

Dims: B batch, L sequence, H heads, K kv_heads, d head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax

from jaxdist.models.hints import Hint

KEPT = "attention"
"""Name (by `checkpoint_name`) of the values that kernels keep for the backward pass.

A remat policy that saves this name does not run the kernel a second time.
"""


@dataclass(frozen=True)
class AttentionRequest:
    """A request for attention, which a kernel may or may not support.

    Attributes:
      platform: platform of the devices, as jax names it: cpu, gpu, tpu, or None if it is unknown.
      dtype: dtype of the operands: float32 or bfloat16.
      heads: number of query heads, over all devices.
      kv_heads: number of key and value heads, each shared by heads / kv_heads query heads.
      window: number of positions before itself that a query sees (and, if not causal, after
        itself); None sets no limit.
      segments: whether a query sees only its own document.
      length: length of a sequence, or None if it is unknown.
      head_parts, kv_head_parts, seq_parts: number of devices over which each of these dims is
        split.
      family: short name of the devices, such as v5e; empty is unknown.
      causal: whether a query sees no position after itself.
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


class Kernel(Protocol):
    """Grouped-query attention: softmax(q k^T / sqrt(d)) v.

    Position i sees position j where |i - j| <= window, both are in the same segment, and, if
    causal, j <= i. All kernels compute the same numbers, up to rounding.
    """

    @property
    def platform(self) -> str | None:
        """Platform that the kernel is written for, or None for a kernel of all platforms."""
        ...

    def fits(self, ask: AttentionRequest) -> str | None:
        """Return a clause without subject that explains why the kernel does not support a request.

        None means that the kernel supports the request.
        """
        ...

    def __call__(
        self,
        q_BLHd: jax.Array,
        k_BLKd: jax.Array,
        v_BLKd: jax.Array,
        segments_BL: jax.Array | None,
        *,
        window: int | None,
        causal: bool,
        hint: Hint,
    ) -> jax.Array:
        """Compute the attended values `[B, L, H, d]`, in q's dtype.

        Args:
          q_BLHd, k_BLKd, v_BLKd: queries, keys, values of one dtype; head h reads keys h // (H /
            K).
          segments_BL: document of each position, int32, or None for a single document.
          window, causal: see `AttentionRequest`.
          hint: the layout of q, k and v on the mesh.
        """
        ...
