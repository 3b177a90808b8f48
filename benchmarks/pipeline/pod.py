"""A decoder of 70 billion parameters in stages on 512 TPU v5p, compiled without any of the TPUs.

The train step of `pod.yaml`, as stage x data x tensor, is compiled ahead of time by libtpu. The
compiler reports the memory on a chip; the program's text shows the bytes sent over each axis, as
`jaxdist inspect` does. libtpu can be loaded by one process only, hence a separate process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from benchmarks.core import child
from benchmarks.core.report import Figure, Listing, lacking
from jaxdist.experiment import build, load
from jaxdist.hlo import compile_with_text, ledger, program_memory, refused_bytes
from jaxdist.mesh import Device
from jaxdist.runtime.hardware import find_device
from jaxdist.runtime.topology import topology_devices
from jaxdist.trees import tree_size

CONFIG = Path(__file__).with_suffix(".yaml")
TOPOLOGY = "v5p:8x8x8"
GOAL = "<= 1"
COMPILE_SECONDS = 300.0
"""The goal for the time to compile."""


@dataclass(frozen=True)
class Pod:
    """A train step compiled for a pod; bytes are of one device.

    Attributes:
      params: the number of parameters.
      mesh: size of each axis.
      peak_bytes: the memory that the step takes, or would take if the compiler refuses it.
      memory_bytes: the memory of a device by its data sheet, or by the refusal.
      fits: whether the compiler accepts the program.
      sent_bytes: the most bytes that a device sends over each mesh axis, or empty if the compiler
        refuses the program.
      compile_seconds: the time of compiling and of reading the program's text, without tracing.
    """

    params: int
    mesh: Mapping[str, int]
    peak_bytes: float
    memory_bytes: float | None
    fits: bool
    sent_bytes: Mapping[str, float]
    compile_seconds: float


def measure() -> list[Pod]:
    """Compile the pod in a new process; without libtpu, return an empty list."""
    return [] if lacking("libtpu") else child.apart(pods, "compiling the pod's step")()


def pods(topology: str = TOPOLOGY, *overrides: str) -> list[Pod]:
    """Compile the pod for the devices of a topology; the list has this one pod."""
    return [compile_pod(topology_devices(topology), overrides)]


def compile_pod(devices: Sequence[Device], overrides: Sequence[str] = ()) -> Pod:
    """Compile the config's step for these devices, with overrides of its settings."""
    document, config = load(CONFIG, overrides)
    experiment = build(config, document, devices=devices)
    program, mesh = experiment.program, experiment.layout.mesh
    lowered = program.train.lower(program.state_shapes, program.batch)
    begun, sent_bytes = time.perf_counter(), {}
    try:
        compiled, text = compile_with_text(lowered)
    except jax.errors.JaxRuntimeError as error:
        sizes = refused_bytes(str(error))
        if sizes is None:
            raise
        fits, (peak_bytes, memory_bytes) = False, sizes
    else:
        known = find_device(devices[0].device_kind)
        fits, peak_bytes = True, program_memory(compiled).peak_bytes
        memory_bytes = known.memory_bytes if known else None
        found = ledger(compiled, mesh, text)
        sent_bytes = {axis: found.sent_bytes(axis) for axis in found.axes}
    seconds = time.perf_counter() - begun
    params = tree_size(program.model.params)
    return Pod(params, dict(mesh.shape), peak_bytes, memory_bytes, fits, sent_bytes, seconds)


def figures(found: Sequence[Pod]) -> list[Figure]:
    """Compare memory and compile time with a device and a goal; NaN where libtpu is absent."""
    if not found:
        return [Figure.skipped("pod program", lacking("libtpu"))]
    (pod,) = found
    name = f"{pod.params / 1e9:.1f}B as {_described(pod.mesh)}"
    note = "all that the step takes on a chip; the reference is what the chip has"
    if not pod.fits:
        note = "refused by the compiler; the reference is what a program may have"
    held = math.nan if pod.memory_bytes is None else pod.memory_bytes / 1e9
    return [
        Figure(f"memory, {name}", pod.peak_bytes / 1e9, held, GOAL, "GB", note),
        Figure(f"compiling, {name}", pod.compile_seconds, COMPILE_SECONDS, GOAL),
    ]


def listing(found: Sequence[Pod]) -> Listing:
    """List the bytes that a device sends in a step, by mesh axis."""
    (pod,) = found
    return Listing(
        f"{pod.params / 1e9:.1f}B as {_described(pod.mesh)}: sent by each chip in a step",
        {"axis": "", "devices": "", "sent": "GB"},
        [(axis, pod.mesh[axis], sent / 1e9) for axis, sent in pod.sent_bytes.items()],
    )


def _described(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())
