"""The bench of optimizers: step times compared with optax's, bytes and temporaries of compiled
programs, and the bytes that sharded updates send.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import cached_property

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import muon
from benchmarks.core import child
from benchmarks.core.harness import REPEATS, interleave
from benchmarks.core.report import Figure, Report
from benchmarks.core.shapes import Shapes, bert_base, resnet50
from jaxdist.hlo import Ledger, ledger
from jaxdist.optim.lamb import lamb
from jaxdist.optim.lars import lars
from jaxdist.types import Grads, OptState, Params, PyTree

RATE = 1e-3
LAMB_FLOOR_BYTES, LARS_FLOOR_BYTES, SGD_BYTES = 40, 28, 12
"""The bytes of memory traffic of a float32 parameter if all passes are fused as far as possible."""
SHARDS = 8
DONATED = "jitted update and apply_updates on one device, parameters and state donated"


def bench(repeats: int = REPEATS) -> Report:
    """Compare LAMB and LARS with optax's, on the shapes of BERT-base and of ResNet-50.

    Times are taken twice: in a process with Python's defaults, and in this process, which the
    command line has started with huge pages, so that optax's temporaries take less time.
    """
    figures = [*_in_plain_process(repeats), *timed(repeats, "huge pages"), *counted()]
    if len(jax.devices()) >= SHARDS:
        figures += sharded_figures(bert_base())
    figures += muon.figures()
    return Report("optim", figures)


def timed(
    repeats: int = REPEATS,
    suffix: str = "",
    *,
    bert: Shapes | None = None,
    resnet: Shapes | None = None,
) -> list[Figure]:
    """Compare steps with optax's, and LAMB's step with AdamW's and with its floor.

    Args:
      repeats: timed pairs of each figure.
      suffix: the end of the figures' names; only figures with an empty suffix have goals.
      bert, resnet: the shapes that replace the shapes of these models, for tests.
    """
    bert, resnet = bert or bert_base(), resnet or resnet50()
    ours, end, goals = OptimizerStep(lamb(RATE), bert), f", {suffix}" * bool(suffix), not suffix
    pairs = [
        ("BERT-base: LAMB over optax.lamb", ours, optax.lamb(RATE), "<= 0.4"),
        ("BERT-base: LAMB over optax.adamw", ours, optax.adamw(RATE), "<= 1.8"),
        (
            "ResNet-50: LARS over optax.lars",
            OptimizerStep(lars(RATE), resnet),
            optax.lars(RATE),
            "<= 0.25",
        ),
        (
            "ResNet-50: LAMB over optax.lamb",
            OptimizerStep(lamb(RATE), resnet),
            optax.lamb(RATE),
            "<= 0.4",
        ),
        (
            "BERT-base: LARS over optax.lars",
            OptimizerStep(lars(RATE), bert),
            optax.lars(RATE),
            "<= 0.25",
        ),
    ]
    figures = [
        compare(name + end, step, OptimizerStep(reference, step.sizes), repeats, goal * goals)
        for name, step, reference, goal in pairs
    ]
    return [*figures, over_floor(f"BERT-base: LAMB over its floor{end}", ours, repeats)]


def counted() -> list[Figure]:
    """Compare bytes and temporaries of the compiled steps with their references."""
    figures: list[Figure] = []
    for model, shapes in (("BERT-base", bert_base()), ("ResNet-50", resnet50())):
        more, less = OptimizerStep(lamb(RATE), shapes), OptimizerStep(lars(RATE), shapes)
        figures += [
            traffic(f"{model}: LAMB traffic", more, LAMB_FLOOR_BYTES, "<= 1.3"),
            temporaries(f"{model}: LAMB temporaries", more, "<= 1"),
            traffic(f"{model}: LARS traffic", less, LARS_FLOOR_BYTES),
            temporaries(f"{model}: LARS temporaries", less, "<= 1"),
        ]
    return figures


def _in_plain_process(repeats: int) -> list[Figure]:
    """Return the figures of `timed` from a process without jaxdist's settings of glibc's malloc.

    Raises:
      RunError: the process fails.
    """
    plain = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    return child.call(timed, repeats, what="timing in a process of its own", environ=plain)


class OptimizerStep:
    """An optimizer's step on tensors of given shapes, on one device, with constant gradients."""

    def __init__(self, transform: optax.GradientTransformation, shapes: Shapes) -> None:
        self.transform = transform
        self.sizes = shapes
        self.shapes = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
        self.parameters = sum(math.prod(shape) for shape in shapes.values())
        self.largest_bytes = 4 * max(math.prod(shape) for shape in shapes.values())

    def _step(self, params: Params, state: OptState, grads: Grads) -> tuple[PyTree, PyTree]:
        updates, state = self.transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled step, which donates its parameters and state."""
        jitted = jax.jit(self._step, donate_argnums=(0, 1))
        state = jax.eval_shape(self.transform.init, self.shapes)
        return jitted.lower(self.shapes, state, self.shapes).compile()

    def __enter__(self) -> OptimizerStep:
        """Make the tensors, which are freed on exit."""
        params = {name: _filled(struct.shape) for name, struct in self.shapes.items()}
        self.state = (params, jax.jit(self.transform.init)(params))
        self.grads = {name: 0.01 * x for name, x in params.items()}
        return self

    def __exit__(self, *exception: object) -> None:
        del self.state, self.grads

    def __call__(self) -> None:
        """Take one step, and wait until it is done."""
        self.state = self.compiled(*self.state, self.grads)
        jax.block_until_ready(self.state)


def _filled(shape: tuple[int, ...]) -> jax.Array:
    """Return values of the magnitude of weights, which all differ within a row."""
    return jnp.broadcast_to(0.02 + 1e-6 * jnp.arange(shape[-1], dtype=jnp.float32), shape)


def compare(
    name: str, ours: OptimizerStep, reference: OptimizerStep, repeats: int, goal: str = ""
) -> Figure:
    """Compare the times of two steps, interleaved."""
    with ours, reference:
        return Figure.compare(name, *interleave(ours, reference, repeats=repeats), goal, DONATED)


def over_floor(name: str, ours: OptimizerStep, repeats: int) -> Figure:
    """Compare a step's time with the time to move the floor's bytes at the speed of an SGD step."""
    sgd = OptimizerStep(optax.sgd(RATE), ours.sizes)
    scale = LAMB_FLOOR_BYTES / SGD_BYTES
    with ours, sgd:
        mine, plain = interleave(ours, sgd, repeats=repeats)
    note = f"{scale:.3g} times an optax.sgd step, which moves {SGD_BYTES} bytes a parameter"
    return Figure(name, mine.median, scale * plain.median, note=note)


def traffic(name: str, ours: OptimizerStep, floor_bytes: int, goal: str = "") -> Figure:
    """Compare the bytes per parameter that the compiled step reads and writes with the floor."""
    cost: Mapping[str, float] = ours.compiled.cost_analysis() or {}
    accessed = cost.get("bytes accessed", math.nan) / ours.parameters
    note = "bytes of float32 traffic a parameter, by XLA's cost analysis"
    return Figure(name, accessed, floor_bytes, goal, "bytes", note)


def temporaries(name: str, ours: OptimizerStep, goal: str = "") -> Figure:
    """Compare the temporary memory of the compiled step with the largest tensor."""
    analysis = ours.compiled.memory_analysis()
    held = math.nan if analysis is None else analysis.temp_size_in_bytes
    note = "beside parameters, gradients and state; the reference is the largest tensor"
    return Figure(name, held, ours.largest_bytes, goal, "B", note)


def sharded_figures(shapes: Shapes) -> list[Figure]:
    """Compare the collectives of sharded LAMB and of sharded AdamW, on a manual axis.

    A tensor is split along its first dim that is a multiple of `SHARDS`. A tensor without such a
    dim is whole on all devices.
    """
    mesh = jax.make_mesh(
        (SHARDS,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:SHARDS]
    )
    specs = {name: _spec(shape) for name, shape in shapes.items()}
    more = sharded(lamb(RATE, specs=specs), shapes, specs, mesh)
    less = sharded(optax.adamw(RATE), shapes, specs, mesh)
    tensors = len(shapes)
    payload = sum(found.payload_bytes for found in more.collectives)
    return [
        Figure(
            "BERT-base: collectives of sharded LAMB",
            len(more.collectives) - len(less.collectives),
            1,
            "<= 1",
            "",
            "more than sharded AdamW has; one all-reduce for all norms of the tree",
        ),
        Figure(
            "BERT-base: their payload",
            payload,
            8 * tensors,
            "<= 1",
            "bytes",
            f"two float32 for each of {tensors} tensors at most",
        ),
    ]


def sharded(
    transform: optax.GradientTransformation,
    shapes: Shapes,
    specs: Mapping[str, PartitionSpec],
    mesh: jax.sharding.Mesh,
) -> Ledger:
    """Return the ledger of an optimizer's update inside `jax.shard_map`."""
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, specs[name]))
        for name, shape in shapes.items()
    }
    state = jax.eval_shape(transform.init, params)
    whole = PartitionSpec()
    state_specs = optax.tree.map_params(
        transform, lambda _, spec: spec, state, specs, transform_non_params=lambda _: whole
    )
    update = jax.shard_map(
        transform.update,
        mesh=mesh,
        in_specs=(specs, state_specs, specs),
        out_specs=(specs, state_specs),
    )
    return ledger(jax.jit(update).lower(params, state, params).compile(), mesh)


def _spec(shape: tuple[int, ...]) -> PartitionSpec:
    dim = next((i for i, size in enumerate(shape) if size % SHARDS == 0), None)
    return PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, "data")
