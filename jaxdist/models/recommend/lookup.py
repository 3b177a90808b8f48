"""The lookup of a batch's rows in a table on one device, in a split table, or in pulled rows.

Dims: B batch, F fields, D width. Each of N devices has b examples, n = b F ids, and r rows of the
table. A device may request c ids from every other device.
"""

from __future__ import annotations

from functools import partial
from math import prod

import jax
import jax.numpy as jnp

from jaxdist.models.hints import Hint

HEADROOM = 2
"""The number of ids that a device may request from another device, as a multiple of an even
share."""


def capacity(ids: int, devices: int) -> int:
    """Return the number of ids that a device may request from another device in the fast method.

    For a larger request, `look_up` uses its slower method.

    Args:
      ids: the number of ids on a device.

    >>> capacity(64, 8), capacity(64, 2)
    (16, 64)
    """
    return min(ids, -(-HEADROOM * ids // devices))


def exchanged_bytes(ids: int, devices: int, width: int) -> int:
    """Return the bytes that a device sends for a lookup of `ids` ids and its gradient.

    Let a device request c ids from each of the N - 1 other devices, and let a row have D values.
    The number is then c (N - 1) (4 + 8 D): 4 bytes for each id, and 4 D bytes each for the
    requested row and for its gradient.
    """
    return capacity(ids, devices) * (devices - 1) * (4 + 8 * width)


def look_up(table_RD: jax.Array, rows_BF: jax.Array, hint: Hint) -> jax.Array:
    """Return rows `[B, F, D]` of a table, whose dim "rows" the mesh may split.

    If all axes that split the rows also split the batch, each device requests each of its distinct
    ids from the device that holds the row. An all-to-all sends the ids, and a second all-to-all
    returns the rows; gradients are sent back in the same manner. If a device would request more
    than `capacity` ids from another device, all devices use a slower method without a limit. In all
    other cases XLA decides on the communication.

    Args:
      rows_BF: the index of each row in the table.
    """
    axes = hint.axes("rows")
    if not axes or not set(axes) <= set(hint.axes("batch")):
        return table_RD[rows_BF]
    function = partial(_asked, axes=axes)
    return hint.on_blocks(function, ("batch", None), ("rows", None), axes=axes)(rows_BF, table_RD)


def look_up_pulled(pulled: jax.Array, places_BF: jax.Array, hint: Hint) -> jax.Array:
    """Return the rows `[B, F, D]` of a batch from its pulled rows, without communication.

    Args:
      pulled: the rows that were pulled from servers, `[N n, D]`; each device has the n rows of its
        examples.
      places_BF: the index of each row among the n rows of its device.
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
    # Each id is requested only once; popular ids would otherwise exceed the capacity of one device.
    # The ids are sorted, so the ids of each owner are contiguous.
    unique, places = jnp.unique(flat, return_inverse=True, size=flat.size, fill_value=own * devices)
    starts = jnp.searchsorted(unique, jnp.arange(devices + 1, dtype=unique.dtype) * own)
    room = capacity(flat.size, devices)
    fetch = partial(_fetched, unique, starts, axes=axes)
    if room == flat.size:
        found = fetch(table_rD, room=room)
    else:
        most = jax.lax.pmax((starts[1:] - starts[:-1]).max(), axes)
        # All devices have the same maximum, so all take the same branch.
        found = jax.lax.cond(
            most > room, partial(fetch, room=flat.size), partial(fetch, room=room), table_rD
        )
    return found[places.reshape(rows_bF.shape)]


def _fetched(
    unique: jax.Array, starts: jax.Array, table_rD: jax.Array, *, axes: tuple[str, ...], room: int
) -> jax.Array:
    """Fetch the rows of sorted unique ids from the devices that hold the rows.

    Args:
      unique: the ids, `[n]`, with padding at the end.
      starts: for each device, the index in `unique` of its first id; the last element is the number
        of ids without padding.
      table_rD: the rows of this device.
      room: the largest number of ids that are requested from each device.
    """
    own, devices = table_rD.shape[0], starts.size - 1
    slots = starts[:-1, None] + jnp.arange(room, dtype=starts.dtype)[None, :]
    wanted = unique[jnp.minimum(slots, unique.size - 1)] % own
    asked = jax.lax.all_to_all(wanted, axes, 0, 0, tiled=True)
    answers = jax.lax.all_to_all(table_rD[asked], axes, 0, 0, tiled=True)
    owner = jnp.minimum(unique // own, devices - 1)
    place = jnp.arange(unique.size, dtype=starts.dtype) - starts[owner]
    return answers[owner, jnp.clip(place, 0, room - 1)]
