"""Use one primitive of jaxdist, a ring all-reduce, in a training loop of your own.

    python examples/own_loop.py       # on 8 fake CPU devices; takes seconds

Each device computes the gradient of its own rows, and a ring sums the gradients by messages between
neighbours, in both directions at once. The program prints the loss, which falls to the noise of the
data (0.01), and the bytes that a device sends for one sum.
"""

from __future__ import annotations

import sys
from functools import partial

import jaxdist

DEVICES, ROWS, WIDTH = 8, 256, 32
jaxdist.prepare(fake_devices=DEVICES)  # jax reads the environment when it is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jaxdist.collectives import Ring, reduce_tree  # noqa: E402

RING = Ring(directions=2)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)

Params = dict[str, jax.Array]


def loss_of(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean squared error of a linear model."""
    return jnp.mean((x @ params["w"] + params["b"][0] - y) ** 2)


def main(steps: int = 100) -> list[float]:
    """Train, and return the losses."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    everywhere, by_row = P(), P("data")

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(everywhere, by_row, by_row),
        out_specs=(everywhere, everywhere),
        check_vma=False,  # jax cannot infer that a ring leaves equal sums on all devices
    )
    def mean_gradients(params: Params, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Params]:
        own = jax.value_and_grad(loss_of)(params, x, y)
        return reduce_tree(own, "data", op="mean", algorithm=RING)

    @jax.jit
    def step(params: Params, state: optax.OptState, x: jax.Array, y: jax.Array) -> tuple:
        loss, grads = mean_gradients(params, x, y)
        updates, state = OPTIMIZER.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (ROWS, WIDTH))
    y = x @ jax.random.normal(keys[1], (WIDTH,)) + 0.1 * jax.random.normal(keys[2], (ROWS,))
    x, y = jax.device_put((x, y), NamedSharding(mesh, by_row))
    params: Params = {"w": jnp.zeros(WIDTH), "b": jnp.zeros(1)}
    state, losses = OPTIMIZER.init(params), []
    for number in range(1, steps + 1):
        params, state, loss = step(params, state, x, y)
        losses.append(float(loss))
        if number % 20 == 0:
            print(f"step {number}  loss {losses[-1]:.4f}")
    numbers = WIDTH + 2
    sent = RING.traffic("all_reduce", 4 * numbers, DEVICES).sent_bytes
    print(f"a device sends {sent:.0f} bytes to sum {numbers} numbers of 4 bytes")
    return losses


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
