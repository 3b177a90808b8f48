"""The predicted MFU of mixtures of experts on pods, compared with MaxText's published steps.

A step is composed of two predictions, since libtpu needs many minutes for the whole program:

- The experts of a layer, forward and backward, are compiled for one chip, and timed by libtpu's
  estimates and by the schedules of megablox's kernels (`jaxdist.cost.kernels`).
- All other parts of the step follow from the formulas of `jaxdist plan`, with ZeRO 3 over all chips
  and full remat: attention, the shared expert, the head, and the gathers and sums of parameters.

Tokens are routed to all experts evenly. Dims: T tokens of a chip, D embed, F hidden width of an
expert, E experts, k experts of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.core import child
from benchmarks.core.report import Figure
from benchmarks.tpu.products import TOPOLOGIES
from jaxdist.cost.step_time import step_time
from jaxdist.errors import RunError
from jaxdist.hlo import compile_with_text
from jaxdist.hlo.groups import MeshLayout
from jaxdist.hlo.parse import parse
from jaxdist.models.feed_forward.mixture import Experts
from jaxdist.models.feed_forward.products import Megablox
from jaxdist.parallel.compiler import preset_options
from jaxdist.planner.model import Decoder
from jaxdist.planner.plan import Plan
from jaxdist.planner.search import judge_plan
from jaxdist.planner.target import meshes, parse_target
from jaxdist.planner.time import gather_seconds
from jaxdist.runtime.topology import topology_devices

PASSES = 4
"""The times that a layer's kernels cross the links in a step: two gathers, and an all-reduce of
their gradients (`jaxdist.planner.time.WHOLE_SUMS`), which counts twice."""
UPDATE_BYTES = 28.0
"""The bytes of memory traffic of AdamW's update for a parameter in float32, with its cast."""


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts on a pod, and MaxText's published MFU on these chips.

    Attributes:
      name: the name of the model.
      topology: the chips, all of which share parameters and the batch.
      dense: the model without its routed experts, with the batch of a step.
      count, top_k, width: E, k and F.
      published: the published MFU.
      masked: whether the published MFU counts products that attention's mask discards.
    """

    name: str
    topology: str
    dense: Decoder
    count: int
    top_k: int
    width: int
    published: float
    masked: bool


MIXTURES = (
    # A decoder cannot have no MLP at all, so a width of 128 represents a model without shared
    # expert.
    Mixture(
        "Mixtral-8x7B, 16 x 4,096 a chip", "v5p:4x4x8",
        Decoder(32, 4096, 32, 8, 128, 128, vocab=32000, window=4096, batch=2048, tied=False),
        8, 2, 14336, 0.5256, masked=True,
    ),
    Mixture(
        "DeepSeek-V3, 2 x 8,192 a chip", "v5p:8x8x8",
        Decoder(61, 7168, 128, 16, 128, 2048, vocab=32000, window=8192, batch=1024, tied=False),
        256, 8, 2048, 152.415 / 459, masked=False,
    ),
)  # fmt: skip
"""The models of `benchmarks/tpu/mixtral_8x7b.yaml` (with `train.batch_size=2048`) and
`deepseek_v3.yaml`. Published are 36 x 4,096 tokens a chip for Mixtral (MaxText's table of optimized
models), and 6 x 8,192 for DeepSeek-V3 (AI-Hypercomputer/tpu-recipes), whose attention is latent."""


@dataclass(frozen=True)
class Layer:
    """The predicted seconds of the experts of a layer on a chip.

    Attributes:
      seconds: the forward and the backward pass, without recomputation.
      forward: the forward pass.
    """

    seconds: float
    forward: float


def compiled_layer(tokens: int, embed: int, width: int, count: int, top_k: int) -> list[Layer]:
    """Compile the experts of a layer and their gradients for one chip of v5p."""
    chip = topology_devices(TOPOLOGIES["v5p"])[:1]
    compute = Experts("swiglu", Megablox())

    def loss(x_TD: jax.Array, weights_Tk: jax.Array, ids_Tk: jax.Array, *kernels: jax.Array):
        return compute(x_TD, ids_Tk, weights_Tk, *kernels).astype(jnp.float32).sum()

    def narrow(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    into, out = narrow(count, embed, width), narrow(count, width, embed)
    weights = jax.ShapeDtypeStruct((tokens, top_k), jnp.float32)
    ids = jax.ShapeDtypeStruct((tokens, top_k), jnp.int32)
    whole = NamedSharding(Mesh(np.array(chip), ("data",)), PartitionSpec())
    grad = jax.value_and_grad(loss, (0, 1, 3, 4, 5))
    lowered = jax.jit(grad, in_shardings=whole, out_shardings=whole).lower(
        narrow(tokens, embed), weights, ids, into, into, out
    )
    _, text = compile_with_text(lowered, preset_options("default", chip[0]))
    time = step_time(parse(text), MeshLayout({"data": 1}, (0,)), chip)
    forward = math.fsum(e.waited_seconds for e in time.entries if "transpose(" not in e.source)
    return [Layer(time.seconds, forward)]


def step_flops(one: Mixture) -> float:
    """Return the model FLOPs of a step, which count attention as the published MFU does."""
    dense = one.dense
    routed = 18.0 * one.top_k * dense.embed * one.width  # Three products, in three passes.
    tokens = dense.batch * dense.window
    return dense.model_flops(masked=one.masked) + tokens * dense.layers * routed


def mfu(one: Mixture, layer: Layer) -> float:
    """Return the predicted MFU of a step, by the definition of the published figure."""
    dense, target = one.dense, parse_target(one.topology)
    chips = target.chips
    places = next(p for p in meshes(target) if p.sizes == (1, chips, 1))
    rest = judge_plan(dense, Plan(data=chips, remat="full"), places, target).seconds.total
    kernels = 3 * one.count * dense.embed * one.width
    once = gather_seconds(target, places.dims[1], chips, 2.0 * kernels)
    update = UPDATE_BYTES * kernels / chips / target.device.memory_bytes_per_second
    # Full remat computes the forward pass twice.
    each = layer.seconds + layer.forward + PASSES * once + update
    peak = target.device.flops_per_second["bfloat16"] * chips
    return step_flops(one) / (peak * (rest + dense.layers * each))


def figures() -> list[Figure]:
    """Compile the experts of a layer of each model, and compare the MFU of a step."""
    note = "experts of a layer compiled, the rest by formula; over MaxText's published MFU"
    found = []
    for one in MIXTURES:
        measure = child.apart(compiled_layer, f"compiling experts of {one.name}")
        chips, dense = parse_target(one.topology).chips, one.dense
        tokens = dense.batch * dense.window // chips
        name = f"MFU, {one.name}, {one.topology}"
        try:
            (layer,) = measure(tokens, dense.embed, one.width, one.count, one.top_k)
        except RunError as error:
            found.append(Figure.skipped(name, str(error)))
            continue
        found.append(Figure(name, mfu(one, layer), one.published, ">= 0.95", "", note))
    return found
