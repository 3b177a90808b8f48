"""The marks around a sum over devices that jaxdist takes step by step, for `jaxdist.proofs`.

A program does not show that a codec's messages, or a tree of sums in a fixed order, add up to the
sum over all devices: tests show it. The marks are names of values, and compile to nothing.
"""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.collectives.axis import Axis, names

BEGINS, ENDS = "jaxdist_sum_begins", "jaxdist_sum_ends"


def begins(x: jax.Array, axis: Axis, number: int) -> jax.Array:
    """Mark this device's term of a sum over `axis`; `number` tells the sums of a program apart."""
    return checkpoint_name(x, f"{BEGINS}:{','.join(names(axis))}:{number}:")


def ends(x: jax.Array, axis: Axis, number: int, dim: int | None = None) -> jax.Array:
    """Mark the sum over `axis` of the terms with this number, or its shard along `dim`."""
    cut = "" if dim is None else dim
    return checkpoint_name(x, f"{ENDS}:{','.join(names(axis))}:{number}:{cut}")
