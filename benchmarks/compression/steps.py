"""The bytes that train steps with compressed gradients send, on CPU devices and on TPUs that need
not be attached: the ledger of each compiled program counts them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import jax

from benchmarks.core.experiments import built, gpt
from benchmarks.core.report import Figure
from jaxdist.errors import JaxdistError
from jaxdist.hlo import Ledger, compile_with_text, ledger
from jaxdist.mesh import DCN, Device
from jaxdist.runtime.topology import topology_devices
from jaxdist.types import Json

MODEL = {"layers": 4, "embed": 512, "heads": 4, "compute_dtype": "bfloat16", "remat": "full"}
DEVICES, TOPOLOGY = 8, "v5e:2x4"
XLA = {"type": "xla"}
FLAT, TWO_NETWORKS = {"data": DEVICES}, {"data": {"dcn": 2, "ici": 4}}
SENT: Mapping[str, tuple[Mapping[str, Json], str]] = {
    "bfloat16": ({"type": "cast"}, "<= 0.501"),
    "int8": ({"type": "quantize"}, "<= 0.27"),
    "int4": ({"type": "quantize", "bits": 4}, "<= 0.14"),
    "sign": ({"type": "sign"}, "<= 0.035"),
}
"""Codecs, and the goals for the bytes of a step, divided by the bytes of a float32 ring."""
BLOCKS = {"type": "quantize", "block": 1024}
PLAIN = {
    "reduce": XLA,
    "reduce_dtype": "bfloat16",
    "zero": {"stage": 3, "gather_dtype": "bfloat16"},
}
FEWER = {
    "reduce": XLA,
    "compression": {**BLOCKS, "bits": 4, "error_feedback": False},
    "zero": {"stage": 3, "gather_codec": BLOCKS, "gather_dtype": "bfloat16"},
}
SECOND = {**FEWER, "zero": {**FEWER["zero"], "secondary": True}}


def figures() -> list[Figure]:
    """Compare steps of a small language model on 8 CPU devices and on 8 TPUs."""
    places: dict[str, list[Device]] = {"CPU": jax.devices()[:DEVICES]}
    try:
        places[TOPOLOGY] = topology_devices(TOPOLOGY)
    except JaxdistError as error:
        return [*_on("CPU", places["CPU"]), Figure.skipped(TOPOLOGY, str(error))]
    return [figure for where, devices in places.items() for figure in _on(where, devices)]


def _on(where: str, devices: list[Device]) -> list[Figure]:
    """Compare the bytes of programs that are compiled for these devices."""
    compiled = partial(_compiled, devices)
    ring, found = compiled({"reduce": XLA}, FLAT).sent_bytes(), []
    for name, (codec, goal) in SENT.items():
        sent = compiled({"compression": codec}, FLAT).sent_bytes()
        note = "a device's, in a step; the reference is float32"
        found.append(Figure(f"{name}: step's bytes, {where}", sent, ring, goal, "bytes", note))
    plain, fewer, second = (compiled(plan, TWO_NETWORKS) for plan in (PLAIN, FEWER, SECOND))
    note = "gather int8, reduce int4; the reference is ZeRO 3 in bfloat16"
    if where == "CPU":
        note += ", which XLA:CPU sends as float32"
    across = f"ZeRO 3 with a second copy: bytes across, {where}"
    return [
        *found,
        Figure(f"ZeRO 3: step's bytes, {where}", fewer.sent_bytes(), plain.sent_bytes(), "",
               "bytes", note),
        Figure(across, _across(second), _across(plain), "<= 0.25", "bytes",
               f"{note}; in collectives that span the slow network"),
    ]  # fmt: skip


def _across(found: Ledger) -> float:
    """Return the bytes that a device sends in collectives that span the slow network."""
    return math.fsum(
        c.times_high * c.sent_bytes
        for c in found.collectives
        if any(axis.endswith(DCN) for axis in c.axes or ())
    )


def _compiled(
    devices: list[Device], parallel: Mapping[str, Json], mesh: Mapping[str, Json]
) -> Ledger:
    settings = gpt(MODEL, window=128, batch_size=DEVICES, parallel={**parallel}, mesh={**mesh})
    program = built(settings, devices).program
    lowered = program.train.lower(program.state_shapes, program.batch)
    if devices[0].platform != "tpu":
        return ledger(lowered.compile(), program.layout.mesh)
    step, text = compile_with_text(lowered)
    return ledger(step, program.layout.mesh, text)
