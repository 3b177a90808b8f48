"""Attention by XLA, which computes all scores at once, in memory quadratic in the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.models.attention.contract import KEPT, Kernel, Qkv
from jaxdist.models.hints import Hint


@dataclass(frozen=True)
class Plain(Kernel):
    """The kernel `plain`: `jax.nn.dot_product_attention` as XLA compiles it."""

    def __call__(self, given: Qkv, *, window: int | None, causal: bool, hint: Hint) -> jax.Array:
        """Compute attention, as `Kernel` specifies."""
        del hint
        return of_jax("xla", given, window, causal=causal)


def of_jax(
    implementation: Literal["xla", "cudnn"], given: Qkv, window: int | None, *, causal: bool
) -> jax.Array:
    """Call `jax.nn.dot_product_attention` with the arguments of `Kernel`."""
    *qkv, segments_BL = given
    mask_B1LL = None
    if segments_BL is not None:
        mask_B1LL = (segments_BL[:, :, None] == segments_BL[:, None, :])[:, None]
    y_BLHd = jax.nn.dot_product_attention(
        *qkv,
        mask=mask_B1LL,
        is_causal=causal,
        local_window_size=None if window is None else (window, 0 if causal else window),
        implementation=implementation,
    )
    return checkpoint_name(y_BLHd, KEPT)
