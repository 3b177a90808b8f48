"""Figure 1 of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054) from compiled programs.

The paper computes the memory of 7.5 billion parameters on each of 64 devices. Here the whole train
step of such a model is compiled for 64 TPU v5p, and XLA reports its memory, or refuses it because
it does not fit. Only one process can load libtpu, so a separate process compiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax

from benchmarks.core import child
from benchmarks.zero.program import MIXED, STAGES, Form, experiment, formula_bytes
from jaxdist.hlo import program_memory, refused_bytes
from jaxdist.mesh import Device
from jaxdist.runtime.topology import topology_devices
from jaxdist.trees import tree_size
from jaxdist.types import JsonObject

TOPOLOGY = "v5p:4x4x4"
WINDOW = 128
"""The tokens on a device: few, since the paper does not count activations."""
MODEL: JsonObject = {
    "type": "gpt",
    "layers": 66,
    "embed": 3072,
    "heads": 24,
    "remat": "full",
    "compute_dtype": "bfloat16",
}
"""A model of 7.48 billion parameters, narrow and deep like the models of the paper."""


@dataclass(frozen=True)
class PaperRow:
    """The memory of one stage; bytes are of one device."""

    stage: int
    form: Form
    params: int
    formula_bytes: float
    peak_bytes: float
    """The memory that the step takes, or would take if the compiler refuses it."""
    memory_bytes: float | None
    """The memory of a device according to the compiler's refusal, or None without a refusal."""

    @property
    def refused(self) -> bool:
        return self.memory_bytes is not None


def row(stage: int, form: Form, devices: Sequence[Device], model: JsonObject) -> PaperRow:
    """Compile one stage, and return its peak memory or the compiler's refusal."""
    optim: JsonObject = {"master_weights": "bfloat16"}
    program = experiment(stage, form, devices, model, WINDOW, optim).program
    params = tree_size(program.model.params)
    formula = params * formula_bytes(MIXED, stage, len(devices))
    lowered = program.train.lower(program.state_shapes, program.batch)
    return PaperRow(stage, form, params, formula, *compiled_bytes(lowered))


def compiled_bytes(lowered: jax.stages.Lowered) -> tuple[float, float | None]:
    """Return a program's peak; if XLA refuses it, the needed memory and a device's memory."""
    try:
        return program_memory(lowered.compile()).peak_bytes, None
    except jax.errors.JaxRuntimeError as error:
        sizes = refused_bytes(str(error))
        if sizes is None:
            raise
        return sizes


def rows() -> Iterator[PaperRow]:
    """Yield every stage in the explicit form."""
    devices = topology_devices(TOPOLOGY)
    return (row(stage, "explicit", devices, MODEL) for stage in STAGES)


measure = child.apart(rows, "compiling the paper's steps")
