"""The lookup of a batch's rows: in one array, over a mesh axis, or among rows of the batch itself.

Dims: B batch, F fields, D width; in a block: b examples, n = b F ids, N devices, r rows of a
device, c ids that one device may ask of another.
"""

from __future__ import annotations

from functools import partial
from math import prod

import jax
import jax.numpy as jnp

from jaxdist.models.hints import Hint

HEADROOM = 2
"""The room for ids that a device asks of another, relative to an even spread."""


def capacity(ids: int, devices: int) -> int:
    """Return the number of ids that a device may ask of another without the slow path.

    >>> capacity(64, 8), capacity(64, 2)
    (16, 64)
    """
    return min(ids, -(-HEADROOM * ids // devices))


def exchanged_bytes(ids: int, devices: int, width: int) -> int:
    """Return the bytes that a device sends for a lookup of `ids` ids and its gradient.

    Ids go one way, rows the other, and gradients of rows as the ids: c (N - 1) (4 + 8 D).
    """
    return capacity(ids, devices) * (devices - 1) * (4 + 8 * width)


def look_up(table_RD: jax.Array, rows_BF: jax.Array, hint: Hint) -> jax.Array:
    """Return the rows `[B, F, D]` of a table, whose dim "rows" the mesh may split.

    Over the axes that also split the batch, each device asks the owners of its ids for their rows,
    each id once, in an all-to-all of ids and one of rows; the gradient goes back the same way. If a
    device asks another for more than `capacity` ids, all devices take a path with room for all.
    Over any other axis, XLA places the communication.
    """
    axes = hint.axes("rows")
    if not axes or not set(axes) <= set(hint.axes("batch")):
        return table_RD[rows_BF]
    function = partial(_asked, axes=axes)
    return hint.on_blocks(function, ("batch", None), ("rows", None), axes=axes)(rows_BF, table_RD)


def look_up_pulled(pulled: jax.Array, places_BF: jax.Array, hint: Hint) -> jax.Array:
    """Return rows `[B, F, D]` of those that were pulled for the batch, without communication.

    Args:
      pulled: rows `[N n, D]`; each device has the n rows of its own examples.
      places_BF: place of each row among the device's own.
    """

    def own(places: jax.Array, rows: jax.Array) -> jax.Array:
        return rows[places]

    axes = hint.axes("batch")
    if not axes:
        return own(places_BF, pulled)
    return hint.on_blocks(own, ("batch", None), ("batch", None), axes=axes)(places_BF, pulled)


def _asked(rows_bF: jax.Array, table_rD: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    devices = prod(jax.lax.axis_size(axis) for axis in axes)
    own, flat = table_rD.shape[0], rows_bF.reshape(-1)
    # Each id once: popular ids would otherwise fill the room of one device. They are sorted, so
    # those of an owner are neighbours.
    unique, places = jnp.unique(flat, return_inverse=True, size=flat.size, fill_value=own * devices)
    starts = jnp.searchsorted(unique, jnp.arange(devices + 1, dtype=unique.dtype) * own)
    room = capacity(flat.size, devices)
    fetch = partial(_fetched, unique, starts, axes=axes)
    if room == flat.size:
        found = fetch(table_rD, room=room)
    else:
        most = jax.lax.pmax((starts[1:] - starts[:-1]).max(), axes)
        # The maximum is common, so all devices take the same branch.
        found = jax.lax.cond(
            most > room, partial(fetch, room=flat.size), partial(fetch, room=room), table_rD
        )
    return found[places.reshape(rows_bF.shape)]


def _fetched(
    unique: jax.Array, starts: jax.Array, table_rD: jax.Array, *, axes: tuple[str, ...], room: int
) -> jax.Array:
    """Return the rows of sorted unique ids from their owners, at most `room` from each."""
    own, devices = table_rD.shape[0], starts.size - 1
    slots = starts[:-1, None] + jnp.arange(room, dtype=starts.dtype)[None, :]
    wanted = unique[jnp.minimum(slots, unique.size - 1)] % own
    asked = jax.lax.all_to_all(wanted, axes, 0, 0, tiled=True)
    answers = jax.lax.all_to_all(table_rD[asked], axes, 0, 0, tiled=True)
    owner = jnp.minimum(unique // own, devices - 1)
    place = jnp.arange(unique.size, dtype=starts.dtype) - starts[owner]
    return answers[owner, jnp.clip(place, 0, room - 1)]
