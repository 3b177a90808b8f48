"""Step: each device computes on its own rows; messages around a ring sum the gradients."""

import jax
import jax.numpy as jnp

DEVICES = 8  # number of devices on the ring
WAYS = ((1, 4), (-1, 3))  # direction of each chain of messages, and its length


def send(x: jax.Array, way: int) -> jax.Array:
    """Send x to the next device of the ring (way 1) or to the previous (-1)."""
    pairs = [(i, (i + way) % DEVICES) for i in range(DEVICES)]
    return jax.lax.ppermute(x, "data", pairs)


def reduce_scatter(blocks: jax.Array) -> jax.Array:
    """Return block i, summed over all devices, on device i; blocks are [DEVICES, ...]."""
    me = jax.lax.axis_index("data")
    total = blocks[me]
    for way, hops in WAYS:  # the sum of block i accumulates on the way to device i
        growing = blocks[(me + way * hops) % DEVICES]
        for hop in range(hops - 1, 0, -1):
            growing = send(growing, way) + blocks[(me + way * hop) % DEVICES]
        total = send(growing, way) + total
    return total


def all_gather(block: jax.Array) -> jax.Array:
    """Return the blocks of all devices, [DEVICES, ...]; the blocks travel around the ring."""
    me = jax.lax.axis_index("data")
    blocks = jnp.zeros((DEVICES, *block.shape), block.dtype).at[me].set(block)
    for way, hops in WAYS:
        passing = block
        for hop in range(1, hops + 1):
            passing = send(passing, way)
            blocks = blocks.at[(me - way * hop) % DEVICES].set(passing)
    return blocks


def ring_sum(x: jax.Array) -> jax.Array:
    """Return the sum of all devices' x [n]; each sends 2 (DEVICES - 1) / DEVICES n numbers."""
    blocks = jnp.pad(x, (0, -x.size % DEVICES)).reshape(DEVICES, -1)
    return all_gather(reduce_scatter(blocks)).reshape(-1)[: x.size]
