"""NVIDIA's fused attention, for which segments become an L x L mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax

from jaxdist.models.attention.contract import AttentionRequest, Kernel, Qkv
from jaxdist.models.attention.plain import of_jax
from jaxdist.models.hints import Hint

MOST_FEATURES = 128
"""The largest head size that the kernel supports on all GPUs on which it runs."""


@dataclass(frozen=True)
class Cudnn(Kernel):
    """The kernel `cudnn`: `jax.nn.dot_product_attention` by cuDNN."""

    platform: ClassVar[str | None] = "gpu"

    def fits(self, ask: AttentionRequest) -> str | None:
        """Return why cuDNN does not support a request, or None if cuDNN supports the request."""
        if ask.platform not in (None, self.platform):
            return f"runs on GPUs, but the mesh has {ask.platform} devices"
        if ask.dtype != "bfloat16":
            return f"needs compute_dtype: bfloat16, but here it is {ask.dtype}"
        if ask.head_dim % 8 or ask.head_dim > MOST_FEATURES:
            return (
                f"needs a head size of 8, 16, ... to {MOST_FEATURES}, but here it is {ask.head_dim}"
            )
        if ask.segments and ask.length is not None and ask.length % 2:
            return f"isolates documents only in sequences of even length, not of {ask.length}"
        return None

    def __call__(self, given: Qkv, *, window: int | None, causal: bool, hint: Hint) -> jax.Array:
        """Compute attention, as `Kernel` specifies."""
        del hint
        return of_jax("cudnn", given, window, causal=causal)
