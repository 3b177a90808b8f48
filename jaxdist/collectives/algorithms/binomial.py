"""Reduction and broadcast along binomial trees.

A tuple of devices defines a tree: `places[v]` is the device of node v, and node 0 is the root. In a
reduction, node v receives from the nodes v + 1, v + 2, v + 4, ..., where the difference is less
than the lowest set bit of v. Node v then sends its partial result to the node whose number is v
without this bit. (The root receives from the nodes 1, 2, 4, ....)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxdist.collectives.axis import Axis, permute, rank
from jaxdist.collectives.contract import Combine, Operation, Traffic

# A tree of devices: element v is the device of node v, and node 0 is the root.
Places = tuple[int, ...]
SendPairs = list[tuple[int, int]]
"""The (sender, receiver) pairs of a step."""


def rooted(root: int, size: int) -> Places:
    """Return the tree whose nodes are the devices in the order root, root + 1, ..., modulo `size`.

    >>> rooted(2, 5)
    (2, 3, 4, 0, 1)
    """
    return tuple((root + v) % size for v in range(size))


def steps_up(places: Places) -> list[SendPairs]:
    """Return the pairs (sender, receiver) of each step of a reduction to the root.

    >>> steps_up(rooted(0, 5))
    [[(1, 0), (3, 2)], [(2, 0)], [(4, 0)]]
    """
    size = len(places)
    return [
        [(places[v], places[v - hop]) for v in range(hop, size, 2 * hop)]
        for hop in (2**k for k in range((size - 1).bit_length()))
    ]


def steps_down(places: Places) -> list[SendPairs]:
    """Return the pairs of each step of a broadcast from the root: a reduction in reverse.

    >>> steps_down(rooted(0, 4))
    [[(0, 2)], [(0, 1), (2, 3)]]
    """
    return [[(b, a) for a, b in step] for step in reversed(steps_up(places))]


def reduce(flat: jax.Array, axis: Axis, places: Places, combine: Combine) -> jax.Array:
    """Reduce the arrays [n] of all devices to [n], along the tree `places`.

    The result is valid on the root only. `combine` combines two arrays.
    """
    for step in steps_up(places):
        arrived = permute(flat, axis, step)
        # A device that receives nothing gets zeros from `permute`. These zeros must not be combined
        # in a max or a min.
        flat = jnp.where(_receives(step, axis, places), combine(flat, arrived), flat)
    return flat


def broadcast(flat: jax.Array, axis: Axis, places: Places) -> jax.Array:
    """Copy the array [n] of the root to all devices, along the tree `places`."""
    for step in steps_down(places):
        arrived = permute(flat, axis, step)
        flat = jnp.where(_receives(step, axis, places), arrived, flat)
    return flat


def traffic(kind: Operation, payload_bytes: float, trees: Sequence[Places]) -> Traffic:
    """Compute the cost of a call that runs along several trees at the same time.

    Args:
      kind: "reduce", "broadcast" or "all_reduce".
      payload_bytes: the bytes of the whole tensor on one device.
      trees: the trees, each of which carries an equal part of the payload.
    """
    ups = [step for places in trees for step in steps_up(places)]
    downs = [step for places in trees for step in steps_down(places)]
    run = {"reduce": ups, "broadcast": downs, "all_reduce": ups + downs}[kind]
    part = payload_bytes / len(trees)
    sends = Counter(sender for step in run for sender, _ in step)
    steps = len(run) // len(trees)
    return Traffic(steps, max(sends.values()) * part, steps * part, len(run))


def _receives(step: SendPairs, axis: Axis, places: Places) -> jax.Array:
    # One program runs on all devices, so each device looks its rank up in a table.
    receivers = {receiver for _, receiver in step}
    return jnp.asarray([device in receivers for device in range(len(places))])[rank(axis)]
