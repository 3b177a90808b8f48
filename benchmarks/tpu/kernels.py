"""The compiler's estimates of single kernels, compared with the chip's limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.core import child
from benchmarks.core.report import Figure
from jaxdist.cost.step_time import step_time
from jaxdist.hlo.groups import MeshLayout
from jaxdist.hlo.ledger import compile_with_text
from jaxdist.hlo.parse import parse
from jaxdist.parallel.compiler import Options
from jaxdist.runtime.hardware import device
from jaxdist.runtime.topology import topology_devices

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1"}
NOTE = (
    "the compiler's own estimate over FLOPs at peak, or bytes at full bandwidth; what is above 1 "
    "is the efficiency that it expects"
)


@dataclass(frozen=True)
class Kernel:
    """An operation, its predicted seconds, and the least seconds that the chip's limits allow."""

    name: str
    seconds: float
    least_seconds: float


def figures(found: Sequence[Kernel]) -> list[Figure]:
    """Compare the predicted seconds with the least; the goal is 15% more."""
    unit = "predicted ms"
    return [
        Figure(k.name, 1e3 * k.seconds, 1e3 * k.least_seconds, "<= 1.15", unit, NOTE * (not i))
        for i, k in enumerate(found)
    ]


def compiled_kernels() -> list[Kernel]:
    """Compile matrix products and an element-wise sum for each kind of chip."""
    kernels = []
    for name, topology in TOPOLOGIES.items():
        chip, known = topology_devices(topology)[:1], device(name)
        mesh = Mesh(np.array(chip), ("data",))
        peak, bandwidth = known.flops_per_second["bfloat16"], known.memory_bytes_per_second
        for side in (4096, 8192):
            x = jax.ShapeDtypeStruct((side, side), jnp.bfloat16)
            seconds = predicted_seconds(jnp.matmul, mesh, x, x)
            kernels.append(Kernel(f"{side}^3 product, {name}", seconds, 2 * side**3 / peak))
        wide = jax.ShapeDtypeStruct((2**14, 2**14), jnp.float32)
        seconds = predicted_seconds(lambda a, b: a * 2 + b, mesh, wide, wide)
        kernels.append(Kernel(f"a x + b, {name}", seconds, 3 * wide.size * 4 / bandwidth))
    return kernels


def predicted_seconds(
    function: Callable[..., jax.Array],
    mesh: Mesh,
    *shapes: jax.ShapeDtypeStruct,
    options: Options | None = None,
) -> float:
    """Compile a function for one chip, and return the seconds of the compiler's estimates."""
    whole = NamedSharding(mesh, PartitionSpec())
    lowered = jax.jit(function, in_shardings=whole, out_shardings=whole).lower(*shapes)
    _, text = compile_with_text(lowered, options)
    return step_time(parse(text), MeshLayout({"data": 1}, (0,)), list(mesh.devices.flat)).seconds


measure = child.apart(compiled_kernels, "compiling single kernels for TPUs")
