"""The axis that a collective runs over: its names, its size, and a device's index along it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax import lax

from jaxdist.errors import CollectiveError, did_you_mean

Axis = str | tuple[str, ...]
"""The name of an axis, or several names, slowest first: devices are counted over all these axes."""

Pairs = Sequence[tuple[int, int]]
"""Pairs (sender, receiver), each a rank along the axis."""


def axis_size(axis: Axis) -> int:
    """Return the number of devices along `axis`, inside shard_map."""
    return math.prod(cast(int, lax.axis_size(name)) for name in names(axis))


def names(axis: Axis) -> tuple[str, ...]:
    """Return the axis as a tuple.

    >>> names("data")
    ('data',)
    """
    return (axis,) if isinstance(axis, str) else tuple(axis)


def rank(axis: Axis) -> jax.Array:
    """Return this device's index along `axis`, an int32 scalar."""
    return lax.axis_index(axis)


def neighbour(axis: Axis, offset: int) -> jax.Array:
    """Return the index of the device `offset` places further along the ring of `axis`."""
    size = axis_size(axis)
    # Both operands are positive: `%` would add code for signs to each compiled kernel.
    return lax.rem(rank(axis) + offset % size, size)


def permute(x: jax.Array, axis: Axis, pairs: Pairs) -> jax.Array:
    """Send `x` along (sender, receiver) pairs of ranks; a device without a sender gets zeros."""
    if isinstance(axis, str):
        return lax.ppermute(x, axis, pairs)
    # lax.ppermute counts the devices of a tuple in the mesh's order, lax.axis_index in the tuple's.
    order = jax.sharding.get_abstract_mesh().axis_names
    ordered = tuple(sorted(axis, key=order.index))
    sizes = [axis_size(name) for name in ordered]
    places = np.arange(math.prod(sizes)).reshape(sizes)
    places = places.transpose([ordered.index(name) for name in axis]).ravel()
    return lax.ppermute(x, ordered, [(int(places[a]), int(places[b])) for a, b in pairs])


def shift(x: jax.Array, axis: Axis, hops: int) -> jax.Array:
    """Send `x` to the device `hops` further along the ring of `axis`, and return what arrives."""
    size = axis_size(axis)
    return permute(x, axis, [(i, (i + hops) % size) for i in range(size)])


def varying(x: jax.Array, axis: Axis) -> jax.Array:
    """Type `x` as varying over the devices of `axis`; its values do not change."""
    for name in names(axis):
        try:
            x = lax.pcast(x, (name,), to="varying")
        except ValueError:
            # `x` is varying already (jax has no public test for that), or a vmap binds the axis.
            continue
    return x


def checked(axis: object, operation: str) -> Axis:
    """Normalize `axis` (a tuple with one name becomes the name).

    Raises:
      CollectiveError: there is no name, a name is not a string or occurs twice, or the axis is not
        bound here.
    """
    where = f"{operation} over {axis!r}"
    found: tuple[Any, ...] = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    if not found:
        raise CollectiveError(f"{where} names no axis: give a mesh axis such as 'data'")
    if not all(isinstance(name, str) for name in found):
        raise CollectiveError(f"{where}: an axis is a name or a tuple of names")
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
                "is outside of jax.shard_map, where no axis is bound: call it in a function that "
                f"jax.shard_map maps over a mesh with axis {name!r}"
            )
        elif name in mesh.axis_names:
            reason = (
                f"needs axis {name!r}, on which XLA places the communication: add it to axis_names "
                f"of jax.shard_map (manual now: {', '.join(bound)})"
            )
        else:
            sizes = ", ".join(f"{axis}: {mesh.shape[axis]}" for axis in bound)
            reason = f"needs axis {name!r}, bound are {{{sizes}}}: {did_you_mean(name, bound)}"
        raise CollectiveError(f"{where} {reason}") from None
