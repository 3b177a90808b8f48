"""Step: a pipeline, in which each device has some layers and microbatches pass through all."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.commands.eject.pieces.gpt import EMBED, block, nats
from jaxdist.commands.eject.pieces.optim.adamw import update
from jaxdist.commands.eject.pieces.optim.skips import careful_update
from jaxdist.commands.eject.pieces.order import BATCH

MESH = {"data": 2, "stage": 2}  # devices along each axis
ROWS = P("data")  # sharding of a batch
PARAMS = {"embedding": P(), "blocks": P("stage"), "norm": P()}  # sharding of the parameters
MOMENTS = (PARAMS, PARAMS)  # sharding of the optimizer's state
SCHEDULE = ("F0 F1 B0 B1", ".. F0 B0 ..")  # tasks of each stage, one per tick
STAGES = 2
MICROBATCHES = 2
SLOTS = 2  # microbatches that a stage stores at a time: number m in slot m % SLOTS


def run_stage(params: Any, x: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the output of this stage's layers and, on the last stage, the rows' total loss."""
    first, last = (jax.lax.axis_index("stage") == stage for stage in (0, STAGES - 1))
    x = jax.lax.cond(first, lambda: params["embedding"][tokens[:, :-1]], lambda: x)
    x, _ = jax.lax.scan(block, x, params["blocks"])
    return x, jax.lax.cond(last, lambda: nats(params, x, tokens[:, 1:]).sum(), lambda: 0.0)


# Sums over an axis are equal along it, which JAX cannot prove: hence check_vma=False.
@partial(jax.shard_map, in_specs=(PARAMS, ROWS), out_specs=(P(), PARAMS), check_vma=False)
def mean_gradients(params: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
    """Return the loss and gradients of a batch; each device runs this for its layers and rows."""
    stage = jax.lax.axis_index("stage")
    tokens = tokens.reshape(MICROBATCHES, -1, tokens.shape[-1])
    nothing = jnp.zeros((tokens.shape[1], tokens.shape[2] - 1, EMBED))
    stages = [row.replace("..", ".0").split() for row in SCHEDULE]
    tasks = [[(".FB".index(task[0]), int(task[1:])) for task in row] for row in stages]

    def tick(carry: Any, now: jax.Array) -> tuple[Any, None]:
        (inputs, cotangents, grads, total), (kind_S, number_S) = carry, now
        number = number_S[stage]
        x_BLD, rows = inputs[number % SLOTS], tokens[number]

        def backward() -> Any:
            # The stage is computed again from its input, because only the input was kept.
            (_, loss), pull = jax.vjp(lambda p, x: run_stage(p, x, rows), params, x_BLD)
            more, down = pull((cotangents[number % SLOTS], 1.0))
            return nothing, down, jax.tree.map(jnp.add, grads, more), total + loss

        idle = (nothing, nothing, grads, total)
        doing = (lambda: idle, lambda: (run_stage(params, x_BLD, rows)[0], *idle[1:]), backward)
        up, down, grads, total = jax.lax.switch(kind_S[stage], doing)
        # Activations move to the next stage, their gradients to the previous; ends receive zeros.
        up = jax.lax.ppermute(up, "stage", [(i, i + 1) for i in range(STAGES - 1)])
        down = jax.lax.ppermute(down, "stage", [(i + 1, i) for i in range(STAGES - 1)])
        # If a stage sent nothing, the index is one past the last slot, so the message is dropped.
        up_S, down_S = (jnp.where(kind_S == sent, number_S % SLOTS, SLOTS) for sent in (1, 2))
        inputs = inputs.at[up_S[(stage - 1) % STAGES]].set(up, mode="drop")
        cotangents = cotangents.at[down_S[(stage + 1) % STAGES]].set(down, mode="drop")
        return (inputs, cotangents, grads, total), None

    waiting = jnp.zeros((SLOTS, *nothing.shape))
    start = (waiting, waiting, jax.tree.map(jnp.zeros_like, params), 0.0)
    (_, _, grads, total), _ = jax.lax.scan(tick, start, jnp.array(tasks).transpose(1, 2, 0))
    # Layers belong to one stage; parameters that all stages share are also summed over the stages.
    grads |= jax.lax.psum({name: grads[name] for name in grads if name != "blocks"}, "stage")
    grads = jax.lax.psum(grads, "data")  #: data
    return jax.lax.psum(total, tuple(MESH)) / BATCH, jax.tree.map(lambda g: g / BATCH, grads)


def train_step(params: Any, moments: Any, batch: Any, step: jax.Array) -> tuple[Any, ...]:
    """Return the parameters and moments after a step, and the loss before it."""
    loss, grads = mean_gradients(params, batch["tokens"])
    return (*update(params, grads, moments, step), loss)  #: not skips
    return (*careful_update(params, grads, moments, step), loss)  #: skips
