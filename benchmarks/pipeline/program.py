"""A small model in the executor of pipelines, whose passes can call the host when they run.

Dims: C chunks, N layers of a chunk, M microbatches, R rows, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.parallel.pipeline.executor.execute import run_pipeline
from jaxdist.parallel.pipeline.executor.model_fns import GradientsAndSums, ModelFns, Visit
from jaxdist.parallel.pipeline.executor.stage import StageContext
from jaxdist.parallel.pipeline.executor.ticks import Activations, Ticks
from jaxdist.parallel.pipeline.model.chunks import to_stages
from jaxdist.pipeline_schedules.schedule import TaskKind
from jaxdist.types import Params, PyTree

AXIS = "stage"
PASSES: dict[Activations, int] = {"recompute": 4, "stash": 3}
"""The number of passes of a chunk with the same FLOPs: forward, gradient of the input, gradient of
the weights, and with recomputation a second forward pass."""

Tell = Callable[[TaskKind], None]
"""A function that each pass of a chunk calls with its kind: FORWARD, INPUT or WEIGHT."""


@dataclass(frozen=True)
class ModelSize:
    """The size of one microbatch, and of one chunk."""

    rows: int
    features: int
    layers: int

    def model_flops(self, activations: Activations, microbatches: int) -> float:
        """Return the FLOPs of the matmuls that one chunk needs.

        >>> ModelSize(rows=2, features=3, layers=1).model_flops("stash", 1)
        108
        """
        product = 2 * self.rows * self.features**2
        return PASSES[activations] * self.layers * product * microbatches


class Arguments(NamedTuple):
    """The arguments of a step.

    Attributes:
      weights: the weights, `[C, N, D, D]`; `arguments` returns chunks in the model's order.
      scale: the only parameter of embedding and head, a scalar.
      rows: the batch, `[M, R, D]`.
    """

    weights: PyTree
    scale: PyTree
    rows: PyTree


def arguments(size: ModelSize, chunks: int, microbatches: int) -> Arguments:
    """Return random float32 parameters and rows."""
    random = np.random.default_rng(0)
    width = size.features

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32)

    weights = normal(chunks, size.layers, width, width) / np.float32(width**0.5)
    return Arguments(weights, np.float32(0.5), normal(microbatches, size.rows, width))


def parts(tell: Tell | None = None) -> ModelFns:
    """Return a model of residual tanh layers, whose embedding and head have no matmuls."""

    def embed(scale: Params, visit: Visit) -> jax.Array:
        return visit.rows * scale

    def blocks(weights_NDD: jax.Array, x_RD: jax.Array, visit: Visit) -> jax.Array:
        if tell is not None:
            weights_NDD, x_RD = _announced(tell, weights_NDD, x_RD)
        for weights_DD in weights_NDD:
            x_RD = x_RD + jnp.tanh(x_RD @ weights_DD)
        return x_RD

    def head(scale: Params, x_RD: jax.Array, visit: Visit) -> tuple[jax.Array, PyTree]:
        total = jnp.mean((x_RD * scale) ** 2)
        return total, total

    return ModelFns(embed, blocks, head)


Both = tuple[jax.Array, jax.Array]


def _announced(tell: Tell, weights: PyTree, x: jax.Array) -> Both:
    """Return both arguments unchanged, so that each pass through them calls the host."""

    def forward(weights: PyTree, x: jax.Array) -> Both:
        return weights, _by_host(tell, TaskKind.FORWARD, x)

    def backward(_: None, gradients: Both) -> Both:
        of_weights, of_x = gradients
        return _by_host(tell, TaskKind.WEIGHT, of_weights), _by_host(tell, TaskKind.INPUT, of_x)

    given = jax.custom_vjp(forward)
    given.defvjp(lambda weights, x: (forward(weights, x), None), backward)
    return given(weights, x)


def _by_host(tell: Tell, kind: TaskKind, x: jax.Array) -> jax.Array:
    """Pass x through a callback that calls `tell`; the compiler cannot drop or reorder the call."""

    def callback(*_: object) -> None:
        tell(kind)

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    # The result aliases the operand's buffer. `jax.pure_callback` would make arrays of its
    # operands, which takes 40 times as long, one device after the other.
    return buffer_callback(callback, shape, input_output_aliases={0: 0})(x)


def stage_mesh(stages: int) -> Mesh:
    """Return a mesh of the first devices, as stages."""
    return build_mesh(MeshConfig(stage=stages), jax.devices()[:stages])


class PlacedStep(NamedTuple):
    """A compiled step, and its arguments, placed on the devices."""

    step: jax.stages.Compiled
    arguments: Arguments

    def __call__(self) -> GradientsAndSums:
        """Run the step to its end."""
        return jax.block_until_ready(self.step(*self.arguments))


Local = Callable[[Params, Params, PyTree], GradientsAndSums]
"""A step on one stage: a function from its chunks, scale and rows to loss and gradients."""


def executor(ticks: Ticks, model: ModelFns) -> Local:
    """Return the step on one stage by jaxdist's executor."""

    def local(chunks: Params, scale: Params, rows: PyTree) -> GradientsAndSums:
        return run_pipeline(StageContext(ticks, model, chunks, scale, rows, AXIS))

    return local


def compile_step(
    local: Local, mesh: Mesh, given: Arguments, placement: tuple[int, ...]
) -> PlacedStep:
    """Compile a step on all stages, and place its arguments."""
    staged, everywhere = PartitionSpec(AXIS), PartitionSpec()
    specs = Arguments(staged, everywhere, everywhere)
    function = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=GradientsAndSums(staged, everywhere, everywhere),
        check_vma=False,
    )
    chunks = to_stages(given.weights, placement)
    placed = [
        jax.device_put(value, NamedSharding(mesh, spec))
        for value, spec in zip(given._replace(weights=chunks), specs, strict=True)
    ]
    return PlacedStep(jax.jit(function).lower(*placed).compile(), Arguments(*placed))
