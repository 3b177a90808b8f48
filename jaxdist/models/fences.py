"""Fences: what XLA must not fuse across.

XLA:TPU puts element-wise work and reductions into the kernel of the matrix product beside them. In
a decoder's block that costs more than it saves: by libtpu's own estimates a product that a norm's
or a gate's work is fused into takes up to 1.4 times as long, more than both by themselves
(`jaxdist bench tpu`). A fence is an identity whose two sides are computed by different kernels.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax

Pass = Literal["none", "backward", "both"]


def fence(x: jax.Array, passes: Pass) -> jax.Array:
    """x as it is, kept apart from what it is used for.

    Args:
      passes: where: only in the backward pass, for the gradient of x, or in both; "none" is no
        fence.
    """
    return x if passes == "none" else _fence(x, passes)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _fence(x: jax.Array, passes: Pass) -> Any:
    return jax.lax.optimization_barrier(x) if passes == "both" else x


def _forward(x: jax.Array, passes: Pass) -> tuple[Any, None]:
    return _fence(x, passes), None


def _backward(passes: Pass, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    del passes
    return (jax.lax.optimization_barrier(cotangent),)


_fence.defvjp(_forward, _backward)
