"""Fences: what XLA must not fuse across.

XLA:TPU puts element-wise work and reductions into the kernel of the matrix product beside them. In
a decoder's block that costs more than it saves: by libtpu's own estimates a product that a norm's
or a gate's work is fused into takes up to 1.4 times as long, more than both by themselves
(`jaxdist bench tpu`). A fence is an identity whose two sides are computed by different kernels.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax

Pass = Literal["none", "backward", "both"]


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def fence(x: jax.Array, passes: Pass) -> jax.Array:
    """x as it is, kept apart from what it is used for.

    Args:
      passes: where: only in the backward pass, for the gradient of x, or in both; "none" is no
        fence.
    """
    return jax.lax.optimization_barrier(x) if passes == "both" else x


def _forward(x: jax.Array, passes: Pass) -> tuple[jax.Array, None]:
    return fence(x, passes), None


def _backward(passes: Pass, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (cotangent if passes == "none" else jax.lax.optimization_barrier(cotangent),)


fence.defvjp(_forward, _backward)
