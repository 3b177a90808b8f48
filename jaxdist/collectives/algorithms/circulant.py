"""Reduce-scatter, all-gather and all-to-all in ceil(log2 N) rounds, for any number N of devices.

Let m be half the number of blocks that a device still has to reduce, rounded up. In a round of the
reduce-scatter, the device keeps m blocks, and sends its other blocks to the device whose index is
larger by m. If N is a power of two, this is the classical recursive halving. For other N, the
classical algorithm runs on M devices, where M is the largest power of two below N. Each further
device first sends all of its S bytes to one of these devices, and receives the result in the end.
The algorithm of this module takes ceil(log2 N) steps for every N, and no device sends more than
(N-1)/N S bytes.

The reduce-scatter is from Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms",
2024 (arXiv 2410.14234). The all-gather is the reduce-scatter in reverse. The all-gather and the
all-to-all are from Bruck et al., 1997.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.algorithms import binomial
from jaxdist.collectives.axis import Axis, axis_size, neighbour, shift
from jaxdist.collectives.contract import Algorithm, Combine, Operation, Traffic


class Circulant(Algorithm):
    """The base class of algorithms whose operations without a root take few rounds.

    On N devices, these operations take ceil(log2 N) rounds.

    Broadcast and reduce run along a binomial tree.
    """

    def reduce_scatter(self, blocks: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        """Reduce-scatter [N, c] -> [c] over N devices, in ceil(log2 N) rounds."""
        rows = [row[0] for row in _from_here(blocks, axis)]
        for more, fewer in rounds(axis_size(axis)):
            # All blocks of a round are one message, which costs one latency.
            sent = jnp.concatenate(rows[fewer:more])
            arrived = jnp.split(shift(sent, axis, fewer), more - fewer)
            # If `more` is odd, the device keeps one block more than it receives. `zip` leaves out
            # this last kept block, and the next line appends it unchanged.
            reduced = [combine(a, b) for a, b in zip(rows, arrived, strict=False)]
            rows = reduced + rows[more - fewer : fewer]
        return rows[0]

    def all_gather(self, block: jax.Array, axis: Axis) -> jax.Array:
        into = jnp.zeros(axis_size(axis) * block.size, block.dtype)
        return all_gather(block, axis, into).reshape(-1, block.size)

    def all_to_all(self, blocks: jax.Array, axis: Axis) -> jax.Array:
        """All-to-all [N, c] -> [N, c] over N devices, in ceil(log2 N) rounds.

        Let d be the distance to the device that a block is for, written as a sum of powers of two.
        The block is sent once for each of these powers, over a distance equal to the power.
        """
        size = axis_size(axis)
        rows = _from_here(blocks, axis)
        for hops in powers(size):
            moving = [i for i in range(size) if i & hops]
            arrived = shift(jnp.concatenate([rows[i] for i in moving]), axis, hops)
            for i, row in zip(moving, jnp.split(arrived, len(moving)), strict=True):
                rows[i] = row
        # The loop overwrites every row, so `blocks` only gives the array its shape and dtype.
        received = blocks
        for distance, row in enumerate(rows):
            received = lax.dynamic_update_slice(received, row, (neighbour(axis, -distance), 0))
        return received

    def broadcast(self, flat: jax.Array, axis: Axis, root: int) -> jax.Array:
        return binomial.broadcast(flat, axis, binomial.rooted(root, axis_size(axis)))

    def reduce(self, flat: jax.Array, axis: Axis, root: int, combine: Combine) -> jax.Array:
        return binomial.reduce(flat, axis, binomial.rooted(root, axis_size(axis)), combine)


def rounds(size: int) -> list[tuple[int, int]]:
    """Return, for each round, how many blocks a device still has to reduce before and after it.

    >>> rounds(8), rounds(6)
    ([(8, 4), (4, 2), (2, 1)], [(6, 3), (3, 2), (2, 1)])
    """
    found = []
    while size > 1:
        found.append((size, -(-size // 2)))
        size = -(-size // 2)
    return found


def all_gather(block: jax.Array, axis: Axis, into: jax.Array) -> jax.Array:
    """All-gather [c] -> [N * c], and write the result into `into`, an array of shape [N * c]."""
    rows = [block]
    for more, fewer in reversed(rounds(axis_size(axis))):
        sent = jnp.concatenate(rows[: more - fewer])
        rows += jnp.split(shift(sent, axis, -fewer), more - fewer)
    for offset, row in enumerate(rows):
        start = neighbour(axis, offset) * block.size
        into = lax.dynamic_update_slice(into, row, (start,))
    return into


def powers(size: int) -> list[int]:
    """Return the powers of two below `size`.

    >>> powers(6)
    [1, 2, 4]
    """
    return [2**k for k in range((size - 1).bit_length())]


def traffic(kind: Operation, payload_bytes: float, size: int) -> Traffic:
    """Compute the cost of all_reduce, reduce_scatter, all_gather or all_to_all."""
    messages = len(rounds(size))
    if kind == "all_to_all":
        moved = sum(i.bit_count() for i in range(size)) * payload_bytes / size
        return Traffic(_exchange_steps(size), moved, moved, messages)
    moved = (size - 1) * payload_bytes / size
    scatter = Traffic(_reduce_steps(size), moved, moved, messages)
    gather = Traffic(_gather_steps(size), moved, moved, messages)
    return {"all_reduce": scatter + gather, "reduce_scatter": scatter, "all_gather": gather}[kind]


def _reduce_steps(size: int) -> int:
    """Return the length of the longest chain of messages of a reduce-scatter.

    In a chain, each message waits for the previous message. The longest chain may have fewer
    messages than there are rounds, because a round need not wait for a previous round that did not
    change the blocks to send.

    >>> [_reduce_steps(size) for size in (2, 3, 4, 5, 6, 7, 8)]
    [1, 1, 2, 2, 2, 3, 3]
    """
    steps = [0] * size
    for more, fewer in rounds(size):
        arrival = 1 + max(steps[fewer:more])
        kept = more - fewer
        steps = [max(step, arrival) for step in steps[:kept]] + steps[kept:fewer]
    return steps[0]


def _gather_steps(size: int) -> int:
    steps = [0]
    for more, fewer in reversed(rounds(size)):
        steps += [1 + max(steps[: more - fewer])] * (more - fewer)
    return max(steps)


def _exchange_steps(size: int) -> int:
    steps = [0] * size
    for hops in powers(size):
        arrival = 1 + max(steps[i] for i in range(size) if i & hops)
        steps = [arrival if i & hops else step for i, step in enumerate(steps)]
    return max(steps)


def _from_here(blocks: jax.Array, axis: Axis) -> list[jax.Array]:
    """Return the rows [1, c] of `blocks`: the row for this device, then for the next device, ..."""
    return [lax.dynamic_index_in_dim(blocks, neighbour(axis, i)) for i in range(axis_size(axis))]
