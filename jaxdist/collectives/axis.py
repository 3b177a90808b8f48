"""Functions for the axis of a collective: names, size, a device's index, and `ppermute`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax import lax

from jaxdist.errors import CollectiveError, did_you_mean

Axis = str | tuple[str, ...]
"""The name of a mesh axis, or a tuple of names, of which the axis across the slowest network comes
first. With several names, the devices are counted over all these axes."""

Pairs = Sequence[tuple[int, int]]
"""Pairs (sender, receiver) of ranks along an axis."""


def axis_size(axis: Axis) -> int:
    """Return the number of devices along `axis`, inside shard_map."""
    return math.prod(cast(int, lax.axis_size(name)) for name in names(axis))


def names(axis: Axis) -> tuple[str, ...]:
    """Return `axis`, which is one name or several names of mesh axes, as a tuple of names.

    >>> names("data")
    ('data',)
    """
    return (axis,) if isinstance(axis, str) else tuple(axis)


def rank(axis: Axis) -> jax.Array:
    """Return this device's index along `axis`, an int32 scalar."""
    return lax.axis_index(axis)


def neighbour(axis: Axis, offset: int) -> jax.Array:
    """Return the index of the device `offset` hops further along the ring of `axis`.

    The offset may be negative.
    """
    size = axis_size(axis)
    # No operand is negative, and `%` would add code for negative operands to each kernel.
    return lax.rem(rank(axis) + offset % size, size)


def permute(x: jax.Array, axis: Axis, pairs: Pairs) -> jax.Array:
    """Send `x` from each sender to its receiver, and return what this device receives.

    A device that receives nothing gets zeros.

    Args:
      x: this device's array.
      axis: the name of a mesh axis, or a tuple of names.
      pairs: the pairs (sender, receiver). A device is in at most one pair as sender, and in at most
        one pair as receiver.
    """
    if isinstance(axis, str):
        return lax.ppermute(x, axis, pairs)
    # For a tuple of names, lax.ppermute counts devices in the order of the mesh, but lax.axis_index
    # counts devices in the order of the tuple.
    order = jax.sharding.get_abstract_mesh().axis_names
    ordered = tuple(sorted(axis, key=order.index))
    sizes = [axis_size(name) for name in ordered]
    places = np.arange(math.prod(sizes)).reshape(sizes)
    places = places.transpose([ordered.index(name) for name in axis]).ravel()
    return lax.ppermute(x, ordered, [(int(places[a]), int(places[b])) for a, b in pairs])


def shift(x: jax.Array, axis: Axis, hops: int) -> jax.Array:
    """Send `x` to the device `hops` hops further along a ring, and return what this device gets."""
    size = axis_size(axis)
    return permute(x, axis, [(i, (i + hops) % size) for i in range(size)])


def varying(x: jax.Array, axis: Axis) -> jax.Array:
    """Return `x` with the type "varying over `axis`", for `jax.shard_map` with `check_vma=True`."""
    for name in names(axis):
        try:
            x = lax.pcast(x, (name,), to="varying")
        except ValueError:
            # `x` is varying already (jax has no public function to test this), or a vmap binds the
            # axis.
            continue
    return x


def checked(axis: object, operation: str) -> Axis:
    """Check an axis, and return the axis, or only the name if the axis is a tuple with one name.

    Args:
      axis: the name of a mesh axis, or a tuple of names.
      operation: the name of the collective, for error messages.

    Raises:
      CollectiveError: there is no name, a name is not a string or occurs twice, or the current
        `jax.shard_map` does not bind the axis.
    """
    where = f"{operation} over {axis!r}"
    found: tuple[Any, ...] = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    if not found:
        raise CollectiveError(
            f"{where} names no axis: pass the name of a mesh axis, such as 'data'"
        )
    if not all(isinstance(name, str) for name in found):
        raise CollectiveError(
            f"{where}: the axis must be the name of a mesh axis or a tuple of such names"
        )
    if len(set(found)) < len(found):
        raise CollectiveError(f"{where} names an axis twice: name each axis once, slowest first")
    for name in found:
        _check_bound(name, where)
    return found[0] if len(found) == 1 else found


def _check_bound(name: str, where: str) -> None:
    try:
        lax.axis_size(name)
    except NameError:
        mesh = jax.sharding.get_abstract_mesh()
        bound = mesh.manual_axes
        if not bound:
            reason = (
                "was called outside of jax.shard_map, where no axis is bound: call the operation "
                f"in a function that jax.shard_map maps over a mesh with axis {name!r}"
            )
        elif name in mesh.axis_names:
            reason = (
                f"needs the manual axis {name!r}, but the axis is automatic: add the axis to "
                f"axis_names of jax.shard_map (manual axes: {', '.join(bound)})"
            )
        else:
            sizes = ", ".join(f"{axis}: {mesh.shape[axis]}" for axis in bound)
            reason = (
                f"needs axis {name!r}, but the bound axes are {{{sizes}}}: "
                f"{did_you_mean(name, bound)}"
            )
        raise CollectiveError(f"{where} {reason}") from None
