"""Run: the training loop, in one process that uses all its devices."""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxdist.commands.eject.pieces.automatic import (
    MESH,
    MOMENTS,
    PARAMS,
    ROWS,
    train_step,
)
from jaxdist.commands.eject.pieces.digits import load_data
from jaxdist.commands.eject.pieces.evaluation import evaluate
from jaxdist.commands.eject.pieces.mlp import init_params
from jaxdist.commands.eject.pieces.optim.adamw import init_moments
from jaxdist.commands.eject.pieces.optim.skips import init_state
from jaxdist.commands.eject.pieces.order import SEED, batch_of

STEPS = 449
LOG_EVERY = 10
FAKE_DEVICES = 8  #: fake # number of CPU devices that replace accelerators


def main(steps: int = STEPS) -> list[float]:
    """Train, and return the loss of each step."""
    mesh = jax.make_mesh((*MESH.values(),), (*MESH,), (jax.sharding.AxisType.Auto,) * len(MESH))
    train, heldout = load_data()  #: heldout
    train, _ = load_data()  #: not heldout
    losses: list[jax.Array] = []
    with jax.set_mesh(mesh):
        key = jax.random.split(jax.random.key(SEED))[0]
        # The initial state is created sharded, so that no device ever holds more than its share.
        params = jax.jit(init_params, out_shardings=PARAMS)(key)
        moments = jax.jit(init_moments, out_shardings=MOMENTS)(params)  #: not skips
        moments = jax.jit(init_state, out_shardings=MOMENTS)(params)  #: skips
        # The old parameters and moments are donated, so that their memory is reused.
        run = jax.jit(train_step, donate_argnums=(0, 1), out_shardings=(PARAMS, MOMENTS, P()))
        for step in range(steps):
            batch = jax.device_put(batch_of(train, step), ROWS)
            params, moments, loss = run(params, moments, batch, np.int32(step))
            losses.append(loss)
            if step > 0 and step % LOG_EVERY == 0:  # a step late, so that the devices never wait
                print(f"step {step} of {steps}  loss {losses[-2]:.4f}", flush=True)
        held = evaluate(params, heldout)  #: heldout
        print("held-out", {name: round(value, 4) for name, value in held.items()})  #: heldout
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  #: fake
    jax.config.update("jax_num_cpu_devices", FAKE_DEVICES)  #: fake
    main()
