"""The bytes and the FLOPs of Muon on shards, from programs that are compiled for a TPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.core.report import Figure
from jaxdist.errors import JaxdistError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.experiment.flops import step_flops
from jaxdist.hlo import ledger
from jaxdist.mesh import Device
from jaxdist.optim.common import NamedParams
from jaxdist.optim.muon import MuonConfig, newton_schulz_flops
from jaxdist.runtime.topology import topology_devices
from jaxdist.types import JsonObject

TOPOLOGY = "v5e:2x4"
PLANS: dict[str, tuple[int, JsonObject, JsonObject]] = {
    "ZeRO 1, 8 layers over 8": (8, {"data": 8}, {"stage": 1}),
    "ZeRO 3, 8 layers over 8": (8, {"data": 8}, {"stage": 3}),
    "ZeRO 2 and tensor, 6 layers over 8": (6, {"data": 4, "tensor": 2}, {"stage": 2}),
}
"""The number of layers, the mesh and `parallel.zero` of each plan."""


def figures(plans: Sequence[str] = tuple(PLANS)) -> Iterator[Figure]:
    """Compare the bytes of exchanged matrices with a formula, and the FLOPs with one device."""
    try:
        devices = topology_devices(TOPOLOGY)
    except JaxdistError as error:
        yield Figure.skipped(f"Muon on {TOPOLOGY}", str(error))
        return
    for name in plans:
        yield from on(devices, name)


def on(devices: Sequence[Device], name: str) -> list[Figure]:
    """Compare the program of a plan, compiled for these devices."""
    layers, mesh, zero = PLANS[name]
    config = ExperimentConfig.model_validate(
        {
            "model": {"type": "gpt", "layers": layers, "embed": 256, "heads": 8, "mlp": 512},
            "data": {"type": "synthetic", "kind": "tokens", "vocab_size": 512, "window": 128},
            "optim": {"type": "muon", "learning_rate": 3e-4},
            "train": {"steps": 10, "batch_size": 16},
            "mesh": mesh,
            "parallel": {"reduce": {"type": "xla"}, "zero": zero},
        }
    )
    experiment = build(config, devices=devices)
    program, optim = experiment.program, config.optim
    assert isinstance(optim, MuonConfig)
    compiled = program.train.lower(program.state_shapes, program.batch).compile()
    found = ledger(compiled, experiment.layout.mesh)
    sent = sum(
        one.sent_bytes * one.times_high
        for one in found.collectives
        if "newton_schulz" in one.source
    )
    tree = NamedParams(program.model.params, program.dims, program.exchange.placements.shares)
    exchange = optim.exchange(tree)
    formula = exchange.sent_bytes
    # The ledger's lower count omits a branch that only the owner of a left-over matrix takes.
    alone = sum(
        len(devices)
        // group.devices
        * sum(at is not None for at in group.last)
        * newton_schulz_flops(group.held[0].of.size, optim.ns_steps)
        for group in exchange.groups
    )
    flops, ends = step_flops(config, devices[0]), f"Muon, {name}"
    note = "of each device in a step, to the owners of matrices and back"
    figures = [Figure(f"{ends}: bytes", sent, formula, "<= 1.02", "bytes", note)]
    if not formula:
        # A ratio to 0 is undefined, so 1 is added to both numbers.
        note += "; the formula is 0 bytes, and both have 1 added"
        figures = [Figure(f"{ends}: bytes", sent + 1, 1, "<= 1", "bytes", note)]
    done = len(devices) * found.flops_low + alone
    note = "of all devices, of the whole step; the reference is one copy's"
    return [*figures, Figure(f"{ends}: FLOPs", done, sum(flops), "<= 1.05", "FLOP", note)]
