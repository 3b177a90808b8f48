"""Fences: identities that keep XLA from fusing the operations on their two sides.

XLA:TPU fuses element-wise work and reductions into the kernel of a neighboring matrix product. In
a decoder's block such a fusion costs more than it saves. By libtpu's estimates, a product that is
fused with a norm or a gate takes up to 1.4 times the time of the product by itself. Two separate
kernels take less time (`jaxdist bench tpu`). A fence is an identity whose two sides are computed by
different kernels.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax

Pass = Literal["none", "backward", "both"]


def fence(x: jax.Array, passes: Pass) -> jax.Array:
    """Return x unchanged, and keep XLA from fusing its computation with its uses.

    Args:
      passes: the passes that have a fence: "backward" (for the gradient of x), "both" (the forward
        and the backward pass) or "none".
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
