"""Collectives along a ring of devices, which send the fewest bytes, and only to neighbors.

Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jax import lax
from pydantic import Field

from jaxdist.collectives.axis import Axis, axis_size, neighbour, permute, rank, shift
from jaxdist.collectives.contract import Algorithm, Combine, Operation, Traffic, split_padded


class Ring(Algorithm):
    """A ring, for any number N of devices with S bytes each.

    In one direction, reduce-scatter and all-gather take N-1 steps each, and send (N-1)/N S bytes.
    An all-reduce takes 2 (N-1) steps, and sends 2 (N-1)/N S bytes. In two directions, the partial
    sums of a block are sent to its device along both sides of the ring at the same time. The result
    is also sent along both sides. A device then sends the same number of bytes as in one direction,
    but in about half of the steps (floor(N/2) for a reduce-scatter or an all-gather). Each link
    carries about half of the bytes. Broadcast and reduce send the whole array along the ring, chunk
    by chunk. An all-to-all sends each block directly to its device, as N-1 messages that do not
    wait for each other.

    The order of summation for the block of device d, in one direction, is x[d+1] + x[d+2] + ... +
    x[d], from left to right, with indices modulo N. In two directions, with r = floor(N/2) and l =
    floor((N-1)/2), the sum is (x[d-r] + ... + x[d-1] + x[d]) + (x[d+l] + ... + x[d+1]).
    """

    type: Literal["ring"] = "ring"
    """The name that selects this algorithm in a config."""
    directions: Annotated[int, Field(ge=1, le=2)] = 1
    """The number of directions in which blocks are sent around the ring: 1, or 2 to halve the
    number of steps on links that send in both directions at once."""
    chunks: Annotated[int, Field(ge=1, le=1024)] = 1
    """The number of chunks of each block. A chunk is reduced while the next chunk is sent, so more
    chunks overlap more work but send more messages."""

    def all_reduce(self, flat: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        blocks = split_padded(flat, axis_size(axis))
        pieces = self._reduce_pieces(blocks, axis, combine)
        # `blocks` is not used again, so its memory can hold the result.
        return self._gather_pieces(pieces, axis, blocks.reshape(-1))[: flat.size]

    def reduce_scatter(self, blocks: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        return jnp.concatenate(self._reduce_pieces(blocks, axis, combine))

    def all_gather(self, block: jax.Array, axis: Axis) -> jax.Array:
        size = axis_size(axis)
        into = jnp.zeros(size * block.size, block.dtype)
        return self._gather_pieces(self._pieces(block), axis, into).reshape(size, -1)

    def _reduce_pieces(self, blocks: jax.Array, axis: Axis, combine: Combine) -> list[jax.Array]:
        """Reduce-scatter [N, c] -> [c], and return the result as a list of chunks."""
        return [self._reduce_piece(piece, axis, combine) for piece in self._pieces(blocks)]

    def _reduce_piece(self, blocks: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        def mine(offset: int) -> jax.Array:
            # All devices run the same program, so the index is not known at trace time.
            return lax.dynamic_index_in_dim(blocks, neighbour(axis, offset), keepdims=False)

        total = mine(0)
        for way, hops in self._ways(axis_size(axis)):
            partial = mine(way * hops)
            for hop in range(hops - 1, 0, -1):
                # The arrived sum is the left operand, because floating-point sums depend on their
                # order, and the class documents this order.
                partial = combine(shift(partial, axis, way), mine(way * hop))
            total = combine(shift(partial, axis, way), total)
        return total

    def _gather_pieces(self, pieces: list[jax.Array], axis: Axis, into: jax.Array) -> jax.Array:
        """All-gather an array [c], which is given as a list of chunks, into `into` [N * c]."""
        size = axis_size(axis)
        width = into.size // size
        start = 0
        for piece in pieces:
            # Each device receives the blocks in a different order. Writing each block to its offset
            # costs nothing. A concatenation would need a rotation by the rank, which is another
            # pass over all elements.
            into = _put(into, piece, rank(axis) * width + start)
            for way, hops in self._ways(size):
                travelling = piece
                for hop in range(1, hops + 1):
                    travelling = shift(travelling, axis, way)
                    into = _put(into, travelling, neighbour(axis, -way * hop) * width + start)
            start += piece.size
        return into

    def broadcast(self, flat: jax.Array, axis: Axis, root: int) -> jax.Array:
        size, here = axis_size(axis), rank(axis)

        def spread(piece: jax.Array) -> jax.Array:
            result = piece
            for way, hops in self._ways(size):
                travelling = piece
                for hop in range(1, hops + 1):
                    end = (root + way * hop) % size
                    # Only this pair of devices exchanges a message. The other devices do not have
                    # the root's data yet, and their messages would use the links for nothing.
                    travelling = permute(travelling, axis, [((end - way) % size, end)])
                    # `permute` returns zeros on all devices that receive nothing.
                    result = jnp.where(here == end, travelling, result)
            return result

        return jnp.concatenate([spread(piece) for piece in self._pieces(flat)])

    def reduce(self, flat: jax.Array, axis: Axis, root: int, combine: Combine) -> jax.Array:
        size = axis_size(axis)

        def collect(piece: jax.Array) -> jax.Array:
            total = piece
            for way, hops in self._ways(size):
                partial = piece
                for hop in range(hops, 0, -1):
                    start = (root - way * hop) % size
                    arrived = permute(partial, axis, [(start, (start + way) % size)])
                    # The partial result is valid only on the receiving device, which sends next.
                    partial = combine(arrived, piece if hop > 1 else total)
                total = partial
            return total

        return jnp.concatenate([collect(piece) for piece in self._pieces(flat)])

    def all_to_all(self, blocks: jax.Array, axis: Axis) -> jax.Array:
        # A device keeps the row that is for itself. `blocks` already has this row at the right
        # index.
        received = blocks
        for hops in range(1, axis_size(axis)):
            row = lax.dynamic_index_in_dim(blocks, neighbour(axis, hops))
            source = neighbour(axis, -hops)
            received = lax.dynamic_update_slice(received, shift(row, axis, hops), (source, 0))
        return received

    def _ways(self, size: int) -> list[tuple[int, int]]:
        """Return the direction (1 or -1) and the number of hops of each chain of messages.

        The chains begin, or end, at the same device. Together the chains reach all other devices.
        """
        if self.directions == 1:
            return [(1, size - 1)]
        # With two devices both neighbors are the same device, and the second chain has no hops.
        ways = [(1, size // 2), (-1, (size - 1) // 2)]
        return [(way, hops) for way, hops in ways if hops]

    def _pieces(self, x: jax.Array) -> list[jax.Array]:
        """Divide `x` along the last dim into at most `self.chunks` chunks that are not empty."""
        width = x.shape[-1]
        count = min(self.chunks, width)
        bounds = [width * i // count for i in range(count + 1)]
        return [x[..., a:b] for a, b in pairwise(bounds)]

    def _traffic(self, kind: Operation, payload_bytes: float, size: int) -> Traffic:
        # Both directions run at the same time, so the longer chain determines the steps.
        longest = self._ways(size)[0][1]
        if kind == "all_to_all":
            sent = (size - 1) * payload_bytes / size
            return Traffic(steps=1, sent_bytes=sent, serial_bytes=sent, messages=size - 1)
        if kind in ("broadcast", "reduce"):
            starts = len(self._ways(size)) if kind == "broadcast" else 1
            return Traffic(
                steps=longest,
                sent_bytes=starts * payload_bytes,
                serial_bytes=(longest + self.chunks - 1) * payload_bytes / self.chunks,
                messages=(size - 1) * self.chunks,
            )
        rounds = 2 if kind == "all_reduce" else 1
        return Traffic(
            steps=rounds * longest,
            sent_bytes=rounds * (size - 1) * payload_bytes / size,
            serial_bytes=rounds * longest * payload_bytes / size,
            messages=rounds * (size - 1) * self.chunks,
        )


def _put(into: jax.Array, piece: jax.Array, start: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(into, piece, (start,))
