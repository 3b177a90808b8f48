"""The marks around what devices compute step by step together, for `jaxdist.proofs`.

A program does not show that a codec's messages, or a tree of sums in a fixed order, add up to the
sum over all devices, nor that blocks of keys which travel from device to device give each query its
attention: tests show it. The marks are names of values, and compile to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.ad_checkpoint import checkpoint_name

BEGINS, ENDS = "jaxdist_sum_begins", "jaxdist_sum_ends"
ENTERS, LEAVES = "jaxdist_shard_enters", "jaxdist_shard_leaves"


def begins(x: jax.Array, axis: str | Sequence[str], number: int) -> jax.Array:
    """Mark this device's term of a sum over `axis`; `number` tells the sums of a program apart."""
    return _named(x, BEGINS, axis, number)


def ends(x: jax.Array, axis: str | Sequence[str], number: int, dim: int | None = None) -> jax.Array:
    """Mark the sum over `axis` of the terms with this number, or its shard along `dim`."""
    return _named(x, ENDS, axis, number, "" if dim is None else str(dim))


def enters(x: jax.Array, axis: str | Sequence[str], number: int) -> jax.Array:
    """Mark this device's shard of an operand; `number` tells the operands of a function apart."""
    return _named(x, ENTERS, axis, number)


def leaves(x: jax.Array, axis: str | Sequence[str], number: int) -> jax.Array:
    """Mark a result of which each device has the shard that it has of the operand `number`."""
    return _named(x, LEAVES, axis, number)


def _named(
    x: jax.Array, mark: str, axis: str | Sequence[str], number: int, dim: str = ""
) -> jax.Array:
    axes = axis if isinstance(axis, str) else ",".join(axis)
    return checkpoint_name(x, f"{mark}:{axes}:{number}:{dim}")
