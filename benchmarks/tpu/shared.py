"""Predicted attention over a sequence that TPUs share, with balanced compute and a gather.

Each program computes attention and its gradients for the heads of Llama-3.1-8B (arXiv 2407.21783)
and sequences of 131,072 tokens. MaxText gathers keys and values over axis context, and each device
has an early and a late chunk of the queries; here this is `gather` in zigzag order.

Dims: B batch, L sequence, H heads, K kv_heads, d head_dim.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.core import child
from benchmarks.core.report import Figure
from jaxdist.cost.context import ContextNeeds, SequenceSplit, best_split, splits_of
from jaxdist.cost.kernels import computed_share
from jaxdist.cost.step_time import StepTime, step_time
from jaxdist.errors import RunError
from jaxdist.hlo import compile_with_text
from jaxdist.hlo.groups import MeshLayout
from jaxdist.hlo.ledger import device_order
from jaxdist.hlo.parse import parse
from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.models.attention.shared import attend_shared
from jaxdist.models.attention.splash import Splash
from jaxdist.models.hints import no_hint
from jaxdist.parallel.compiler import preset_options
from jaxdist.runtime.topology import topology_devices

NEEDS = ContextNeeds(heads=32, kv_heads=8, head_dim=128, length=131_072, gathers=True)
TOPOLOGIES = {8: "v5p:2x4x4", 16: "v5p:2x2x4"}
"""The chips by the size of the axis context; the axis data has the remaining factor."""
PREDICTED = "predicted s"
_KERNEL = re.compile(r"splash_m[hq]a_\w+, blocks of (\d+)")


@dataclass(frozen=True)
class SharedTime:
    """The predicted seconds of attention and its gradients, for a device.

    Attributes:
      way: the method by which devices share a sequence.
      seconds: all seconds.
      exposed: the part in which the device waits for collectives.
      balanced: the seconds of the kernels, if devices computed equal shares of the pairs of
        positions that causality keeps, and nothing else.
    """

    way: str
    seconds: float
    exposed: float
    balanced: float


def figures() -> list[Figure]:
    """Compile attention for each size, by the method of `auto` and by a gather."""
    found: list[Figure] = []
    for size in TOPOLOGIES:
        measure = child.apart(predicted, f"compiling attention over {size} TPUs")
        try:
            ours, gathered = (measure(size, gather=gather)[0] for gather in (False, True))
        except RunError as error:
            found.append(Figure.skipped(f"attention over {size} TPUs", str(error)))
            continue
        found += compared(f"131,072 tokens, context {size}", ours, gathered)
    return found


def compared(name: str, ours: SharedTime, gathered: SharedTime) -> list[Figure]:
    """Compare a method with balanced compute, and with a gather."""
    note = f"{ours.way}; forward and backward, over the kernels with equal shares of the pairs"
    beside = f"{ours.way}, over {gathered.way} in zigzag order"
    exposed, seconds = ours.exposed, ours.seconds
    return [
        Figure(f"attention, {name}", seconds, ours.balanced, "<= 1.15", PREDICTED, note),
        Figure(f"waits of attention, {name}", exposed, seconds, "<= 0.1", PREDICTED, ours.way),
        Figure(
            f"attention over a gather, {name}", seconds, gathered.seconds, "<= 0.95", PREDICTED,
            beside,
        ),
    ]  # fmt: skip


def predicted(size: int, *, gather: bool) -> list[SharedTime]:
    """Compile attention over `size` devices, and predict its time."""
    devices = topology_devices(TOPOLOGIES[size])
    mesh = build_mesh(MeshConfig(data=len(devices) // size, context=size), devices)
    splits = splits_of("gather" if gather else "auto", ("context",), size)
    ordered = [replace(one, order="zigzag" if one.groups > 1 else one.order) for one in splits]
    best = best_split(ordered, NEEDS)
    assert best is not None, size
    time = step_seconds(mesh, best[0], NEEDS)
    exposed = sum(time.exposed_seconds.values())
    balanced = sum(
        entry.waited_seconds * (1 + 1 / NEEDS.length) / 2 / computed_share(NEEDS.length, block)
        for entry in time.entries
        if (kernel := _KERNEL.search(entry.what)) and (block := int(kernel[1]))
    )
    return [SharedTime(best[0].describe(), time.seconds, exposed, balanced)]


def step_seconds(mesh: Mesh, split: SequenceSplit, needs: ContextNeeds) -> StepTime:
    """Return the predicted time of a program with attention and its gradients."""
    spec = PartitionSpec("data", "context")
    splash = Splash(family="v5p")
    kernel: Any = partial(splash, window=None, causal=True, hint=no_hint)
    given = {"window": None, "causal": True, "pieces": splash.pieces}
    local = partial(attend_shared, split, kernel, **given)
    attend = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        return jax.vjp(attend, q, k, v)[1](dout)

    rows, whole = mesh.shape["data"], NamedSharding(mesh, spec)
    shapes = [
        jax.ShapeDtypeStruct((rows, needs.length, heads, needs.head_dim), jnp.bfloat16)
        for heads in (needs.heads, needs.kv_heads, needs.kv_heads, needs.heads)
    ]
    lowered = jax.jit(gradients, in_shardings=whole, out_shardings=whole).lower(*shapes)
    options = preset_options("default", mesh.devices.flat[0])
    compiled, text = compile_with_text(lowered, options)
    module = parse(text)
    order = device_order(compiled, mesh) or tuple(range(module.devices))
    return step_time(module, MeshLayout(dict(mesh.shape), order), list(mesh.devices.flat))
