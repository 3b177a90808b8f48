"""What a kernel of attention is given, says and returns.

Dims: B batch, L sequence, H heads, K kv_heads, d head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax

from jaxdist.models.hints import Hint

KEPT = "attention"
"""Name (`jax.ad_checkpoint.checkpoint_name`) of what fused kernels keep for the backward pass.

A remat policy that saves this name does not run the kernel again.
"""


@dataclass(frozen=True)
class Ask:
    """Attention that a kernel may or may not have.

    Attributes:
      platform: of the devices, as jax names it: cpu, gpu or tpu; None is not known.
      dtype: of the operands: float32 or bfloat16.
      heads: query heads, of all devices together.
      kv_heads: key and value heads, each shared by heads / kv_heads query heads.
      window: how many positions before itself a query sees; None is all.
      segments: whether a query sees its own document alone.
      length: positions of a sequence; None is not known yet.
      head_parts, kv_head_parts, seq_parts: over how many devices each of these dims is split.
      family: short name of the devices, such as v5e; empty is not known.
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


class Kernel(Protocol):
    """Causal grouped-query attention: softmax(q k^T / sqrt(d)) v.

    Position i sees position j where 0 <= i - j <= window and both are of one segment. All kernels
    give the same numbers, but for rounding.
    """

    @property
    def platform(self) -> str | None:
        """Of the devices that it is written for; None is all."""
        ...

    def fits(self, ask: Ask) -> str | None:
        """Why it cannot do what is asked, a clause without subject; None if it can."""
        ...

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
        """The attended values `[B, L, H, d]`, in q's dtype.

        Args:
          q_BLHd, k_BLKd, v_BLKd: of one floating dtype; head h reads keys h // (H / K).
          segments_BL: int32, the document of each position; None is one document.
          window: see `Ask`.
          hint: how q, k and v lie on the mesh.
        """
        ...
