"""Two trainers that do not use jaxdist, with faults that can be planted in each trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS, WIDTH, HIDDEN, CLASSES = 16, 8, 12, 5
Step = Callable[[Any, Any], tuple[Any, Any]]


def mesh_of(count: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:count]), ("data",))


def batch_on(mesh: Mesh) -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    host = {
        "x": random.normal(size=(ROWS, WIDTH)).astype(np.float32),
        "y": random.integers(CLASSES, size=ROWS).astype(np.int32),
        "weight": np.ones(ROWS, np.float32),
    }
    return {name: jax.device_put(a, NamedSharding(mesh, P("data"))) for name, a in host.items()}


SPECS = {"up": P(None, "data"), "down": P("data"), "bias": P()}
"""The partition specs: all parameters are sharded, except the bias."""
FSDP_FAULTS = (
    "gradients of a shard are not summed",
    "the bias's gradient is not summed",
    "the norm of a shard clips",
    "the weight of a device's rows divides",
    "the loss of a device's rows is logged",
    "gradients are divided by the devices again",
)


def fsdp_state(mesh: Mesh) -> dict[str, Any]:
    random = np.random.default_rng(1)
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, CLASSES), "bias": (CLASSES,)}
    params = {
        name: jax.device_put(
            random.normal(size=shape).astype(np.float32) / 3, NamedSharding(mesh, SPECS[name])
        )
        for name, shape in shapes.items()
    }
    momentum = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "momentum": momentum, "step": jnp.zeros((), jnp.int32)}


def fsdp_step(mesh: Mesh, fault: str = "") -> Step:
    """Return a data-parallel step that gathers sharded parameters and scatters gradients."""

    def gathered(name: str, leaf: jax.Array) -> jax.Array:
        dims = [dim for dim, axis in enumerate(SPECS[name]) if axis == "data"]
        return lax.all_gather(leaf, "data", axis=dims[0], tiled=True) if dims else leaf

    def scattered(name: str, grad: jax.Array) -> jax.Array:
        dims = [dim for dim, axis in enumerate(SPECS[name]) if axis == "data"]
        if not dims:
            return grad if fault == FSDP_FAULTS[1] else lax.psum(grad, "data")
        if fault == FSDP_FAULTS[0]:
            size = grad.shape[dims[0]] // mesh.size
            start = lax.axis_index("data") * size
            return lax.dynamic_slice_in_dim(grad, start, size, dims[0])
        return lax.psum_scatter(grad, "data", scatter_dimension=dims[0], tiled=True)

    def local(state: Any, batch: Any) -> Any:
        whole = {name: gathered(name, leaf) for name, leaf in state["params"].items()}

        def total(params: Any) -> jax.Array:
            hidden = jax.nn.relu(batch["x"] @ params["up"])
            logits = hidden @ params["down"] + params["bias"][None]
            found = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return (found * batch["weight"]).sum()

        loss, grads = jax.value_and_grad(total)(whole)
        weight = batch["weight"].sum()
        if fault == FSDP_FAULTS[3]:
            grads = jax.tree.map(lambda g: g / jnp.maximum(weight, 1e-6) / mesh.size, grads)
        all_weight = lax.psum(weight, "data")
        scale = 1.0 if fault == FSDP_FAULTS[3] else jnp.maximum(all_weight, 1e-6)
        if fault == FSDP_FAULTS[5]:
            scale = scale * mesh.size
        grads = {name: scattered(name, g) / scale for name, g in grads.items()}
        squares = {name: jnp.sum(g * g) for name, g in grads.items()}
        shards = squares["up"] + squares["down"]
        if fault != FSDP_FAULTS[2]:
            shards = lax.psum(shards, "data")
        clip = jnp.minimum(1.0, 0.5 / jnp.maximum(jnp.sqrt(shards + squares["bias"]), 1e-6))
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g * clip, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
        shown = loss / jnp.maximum(weight, 1e-6) if fault == FSDP_FAULTS[4] else (
            lax.psum(loss, "data") / jnp.maximum(all_weight, 1e-6)
        )  # fmt: skip
        return {"params": params, "momentum": momentum, "step": state["step"] + 1}, {"loss": shown}

    specs = {"params": SPECS, "momentum": SPECS, "step": P()}
    whole = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, P("data")),
        out_specs=(specs, {"loss": P()}),
        check_vma=False,
    )
    return jax.jit(whole, donate_argnums=0)


NNX_FAULTS = (
    "the mean of the means of shards",
    "the sum of shards is not divided",
    "the learning rate grows with the devices",
    "the norm of each shard clips",
    "the accuracy of the first shard is logged",
    "the statistics of the first shard are kept",
)


class Net(nnx.Module):
    def __init__(self, mesh: Mesh, rngs: nnx.Rngs) -> None:
        split = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "data"))
        self.up = nnx.Linear(WIDTH, 16, kernel_init=split, rngs=rngs)
        self.down = nnx.Linear(16, CLASSES, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(WIDTH))
        self.shards = mesh.size

    def __call__(self, x: jax.Array, *, fault: str) -> jax.Array:
        seen = x[: len(x) // self.shards] if fault == NNX_FAULTS[5] else x
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * seen.mean(0)
        return self.down(jax.nn.relu(self.up(x - self.mean[...][None])))


def nnx_pair(mesh: Mesh) -> tuple[Any, Any]:
    """Return the graph and the state of a model with its optimizer, placed on a mesh."""
    with jax.set_mesh(mesh):
        model = Net(mesh, nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        graph, state = nnx.split((model, optimizer))
        placed = jax.device_put(state, nnx.get_named_sharding(state, mesh))
    return graph, placed


def nnx_step(mesh: Mesh, fault: str = "") -> Step:
    """Return a step by `nnx.jit` with shardings, in which XLA places the communication."""
    graph, _ = nnx_pair(mesh)
    shards = mesh.size

    @nnx.jit
    def train(model: Any, optimizer: Any, batch: Any) -> Any:
        def loss_of(model: Any) -> Any:
            logits = model(batch["x"], fault=fault)
            each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            totals = (each * batch["weight"]).reshape(shards, -1).sum(1)
            counts = batch["weight"].reshape(shards, -1).sum(1)
            if fault == NNX_FAULTS[0]:
                loss = (totals / jnp.maximum(counts, 1e-6)).mean()
            else:
                loss = totals.sum() / jnp.maximum(counts.sum(), 1e-6)
            return loss * (shards if fault == NNX_FAULTS[1] else 1), logits

        (loss, logits), grads = nnx.value_and_grad(loss_of, has_aux=True)(model)

        def norm(g: jax.Array) -> jax.Array:
            parts = shards if fault == NNX_FAULTS[3] and g.size % shards == 0 else 1
            return jnp.sqrt((g.reshape(parts, -1) ** 2).sum(1)).mean()

        largest = sum(jax.tree.leaves(jax.tree.map(norm, grads)))
        rate = shards if fault == NNX_FAULTS[2] else 1
        clip = rate * jnp.minimum(1.0, 0.5 / jnp.maximum(largest, 1e-6))
        optimizer.update(model, jax.tree.map(lambda g: g * clip, grads))
        right = logits.argmax(1) == batch["y"]
        right = right[: len(right) // shards] if fault == NNX_FAULTS[4] else right
        return loss, right.mean()

    def step(state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        loss, accuracy = train(model, optimizer, batch)
        return nnx.state((model, optimizer)), {"loss": loss, "accuracy": accuracy}

    return step
