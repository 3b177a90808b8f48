"""Train steps under each stage of ZeRO, compiled but not run, to compare them with formulas.

Separate processes compute the rows, since the number of devices is fixed when jax starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import jax

from benchmarks.core import child
from benchmarks.core.experiments import built, gpt
from jaxdist.experiment import Experiment
from jaxdist.hlo import Ledger, ledger
from jaxdist.mesh import Device
from jaxdist.runtime.topology import topology_devices
from jaxdist.trees import tree_size
from jaxdist.types import JsonObject

Form = Literal["explicit", "auto"]
REDUCE: Mapping[Form, Any] = {"explicit": {"type": "xla"}, "auto": None}
"""The reduction of each form: explicit collectives on a manual axis, or collectives that XLA
derives from sharding constraints."""
STAGES = (0, 1, 2, 3)
CPU_COUNTS = (8, 64)
TOPOLOGY = "v5e:2x4"

StateBytes = tuple[float, float, float]
"""The bytes of a parameter, of its gradient and of its optimizer state."""
FLOAT32: StateBytes = (4, 4, 8)
"""The 16 bytes per parameter of float32 with AdamW."""
MIXED: StateBytes = (2, 2, 12)
"""The 16 bytes per parameter of bfloat16, with master weights and moments of AdamW in float32."""

MODEL = {"type": "gpt", "embed": 512, "heads": 8}
DEEP, SHALLOW = 8, 4
"""Two numbers of layers, whose difference in memory shows the memory of a layer."""
WINDOW = 16
"""The tokens on a device: few, so that activations take little memory."""


def formula_bytes(kinds: StateBytes, stage: int, devices: int) -> float:
    """Return the bytes per parameter on one device.

    Stage 1 splits the optimizer state, stage 2 also gradients, stage 3 also parameters.

    >>> [formula_bytes(FLOAT32, stage, 8) for stage in STAGES]
    [16, 9.0, 5.5, 2.0]
    """
    split_from = (3, 2, 1)
    return sum(
        size / devices if stage >= first else size
        for size, first in zip(kinds, split_from, strict=True)
    )


def bound_bytes(params_bytes: float, stage: int, devices: int) -> float:
    """Return the least bytes that a device sends in a step: 2(N-1)/N S, or 3(N-1)/N S in stage 3.

    Here N is the number of devices, and S the bytes of the parameters. A reduction is a
    reduce-scatter and an all-gather, (N-1)/N S each; stage 3 gathers parameters twice, for the
    forward and for the backward pass.

    >>> bound_bytes(8.0, 2, 4), bound_bytes(8.0, 3, 4)
    (12.0, 18.0)
    """
    return (3 if stage == 3 else 2) * (devices - 1) / devices * params_bytes


@dataclass(frozen=True)
class ZeroRow:
    """A train step of `DEEP` layers; bytes and FLOPs are of one device."""

    platform: str
    devices: int
    stage: int
    form: Form
    remat: str
    params: int
    peak_bytes: float
    """The peak memory of the program."""
    bytes_per_param: float | None
    """The bytes that further layers add, per parameter; see `added_bytes_per_param`."""
    sent_bytes: float
    flops: float
    ideal_flops: float
    """The FLOPs of the model alone: see `ideal_flops`."""


def experiment(
    stage: int,
    form: Form,
    devices: Sequence[Device],
    model: JsonObject,
    window: int,
    optim: JsonObject | None = None,
) -> Experiment:
    """Build a gpt with AdamW on all these devices, with a batch of one window per device."""
    parallel = {"reduce": REDUCE[form], "zero": {"stage": stage}}
    count = len(devices)
    sections = {"mesh": {"data": count}, "parallel": parallel, "optim": optim or {}}
    return built(gpt(model, window=window, batch_size=count, **sections), devices)


@dataclass(frozen=True)
class CompiledStep:
    """The ledger of one compiled train step, and the size of its model."""

    layers: int
    params: int
    ledger: Ledger


def compile_step(
    stage: int, form: Form, devices: Sequence[Device], *, layers: int, remat: str = "full"
) -> CompiledStep:
    """Compile the train step of `experiment`."""
    model = {**MODEL, "layers": layers, "remat": remat}
    found = experiment(stage, form, devices, model, WINDOW)
    program = found.program
    compiled = program.train.lower(program.state_shapes, program.batch).compile()
    return CompiledStep(
        layers, tree_size(program.model.params), ledger(compiled, found.layout.mesh)
    )


def added_bytes_per_param(deep: CompiledStep, shallow: CompiledStep) -> float:
    """Return the peak memory that the additional layers take, per parameter of these layers.

    Memory that does not grow with depth cancels out: a layer's activations, one gathered layer,
    logits, and the embedding's state. The state grows with depth, and so do temporaries of the
    model's size and the activations that full remat keeps. These activations are subtracted, since
    their size is known: the input of each layer, window x embed in float32.
    """
    layers, params = deep.layers - shallow.layers, deep.params - shallow.params
    peaks = deep.ledger.memory.peak_bytes - shallow.ledger.memory.peak_bytes
    kept_bytes = layers * WINDOW * int(MODEL["embed"]) * 4
    return (peaks - kept_bytes) / params


@cache
def ideal_flops() -> float:
    """Return the FLOPs of one device's rows, compiled for a single device without remat."""
    alone = compile_step(0, "auto", jax.devices()[:1], layers=DEEP, remat="none")
    return alone.ledger.flops_high


def row(
    platform: str,
    devices: Sequence[Device],
    stage: int,
    form: Form,
    *,
    remat: str = "full",
    memory: bool = False,
) -> ZeroRow:
    """Compile one step and read its figures; `memory` compiles a second step with fewer layers."""
    deep = compile_step(stage, form, devices, layers=DEEP, remat=remat)
    added = None
    if memory:
        added = added_bytes_per_param(deep, compile_step(stage, form, devices, layers=SHALLOW))
    return ZeroRow(
        platform=platform,
        devices=len(devices),
        stage=stage,
        form=form,
        remat=remat,
        params=deep.params,
        peak_bytes=deep.ledger.memory.peak_bytes,
        bytes_per_param=added,
        sent_bytes=deep.ledger.sent_bytes(),
        flops=deep.ledger.flops_high,
        ideal_flops=ideal_flops(),
    )


def platform_rows(platform: str) -> Iterator[ZeroRow]:
    """Yield the rows of "cpu" or "tpu"."""
    if platform == "tpu":
        return tpu_rows(topology_devices(TOPOLOGY))
    return cpu_rows(jax.devices())


def cpu_rows(devices: Sequence[Device]) -> Iterator[ZeroRow]:
    """Yield every stage in both forms with its memory, and the first and last without remat."""
    for count in CPU_COUNTS:
        for stage in STAGES:
            for form in REDUCE:
                yield row("cpu", devices[:count], stage, form, memory=True)
    for stage in (STAGES[0], STAGES[-1]):
        yield row("cpu", devices[: CPU_COUNTS[0]], stage, "explicit", remat="none")


def tpu_rows(devices: Sequence[Device]) -> Iterator[ZeroRow]:
    """Yield every stage in the explicit form."""
    for stage in STAGES:
        yield row("tpu", devices, stage, "explicit")


measure = child.apart(
    platform_rows,
    "compiling steps for {}",
    devices=lambda platform: max(CPU_COUNTS) if platform == "cpu" else None,
)
"""A function that returns the rows of a platform, "cpu" or "tpu", from another process."""
