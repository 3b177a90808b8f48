"""The predicted time of a step on a TPU, from the compiled program.

The time of compute is the compiler's estimate, and the time of a collective is its bytes divided by
the rate of its links. The schedule determines how long the device waits for collectives. Work
without an estimate is timed at an assumed rate and listed. No time is predicted for a CPU or a GPU,
whose compilers write no estimates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxdist.cost.kernels import kernel_work
from jaxdist.cost.torus import Torus, torus_of
from jaxdist.hlo.entries import Entry, ProgramTimeline, Resource
from jaxdist.hlo.estimates import Effort
from jaxdist.hlo.groups import MeshLayout
from jaxdist.hlo.lockstep import Lockstep, mismatch
from jaxdist.hlo.parse import Module
from jaxdist.hlo.records import Collective
from jaxdist.hlo.timeline import play
from jaxdist.runtime.hardware import Device, find_device
from jaxdist.types import JsonObject


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The predicted time of a run of a program on each device, with its parts.

    Attributes:
      seconds: the total time, in which a conditional whose branch is unknown takes the most
        expensive branch.
      seconds_low: the total time, in which such a conditional takes the cheapest branch.
      compute_seconds: the time in which the device computes, including kernels of an assumed rate.
      assumed_seconds: the part of `compute_seconds` at an assumed rate.
      copy_seconds: the time of waits for copies between memories.
      exposed_seconds: the time of waits for collectives, by the mesh axes of the collectives.
      overlapped_seconds: the time of collectives that run while the device computes, by mesh axes.
      entries: every instruction that takes time, the most expensive first.
      unknown_loops: the names of the loops of unknown length. Only one iteration of each such loop
        is counted, so the step takes longer.
      bubble_seconds: the time, over all ticks, for which a pipeline's stages wait on average for
        the stage that takes longest. All other times are means over stages.
      schedule: the pipeline's schedule whose ticks are timed, or "" if no ticks are timed.
      unmatched: the reason why the schedule's ticks were not found in the program, or "" if they
        were found or there is no pipeline. Without the ticks, every iteration is assumed to take
        its most expensive branches.
    """

    seconds: float
    seconds_low: float
    compute_seconds: float
    assumed_seconds: float
    copy_seconds: float
    exposed_seconds: Mapping[str, float]
    overlapped_seconds: Mapping[str, float]
    entries: tuple[Entry, ...]
    unknown_loops: tuple[str, ...]
    bubble_seconds: float = 0.0
    schedule: str = ""
    unmatched: str = ""

    def to_json(self) -> JsonObject:
        """Return the totals, and the entries whose time is an assumption, as plain data."""
        found = dataclasses.asdict(self)
        found["entries"] = [dataclasses.asdict(e) for e in self.entries if e.basis == "assumed"]
        return found


@dataclasses.dataclass(frozen=True)
class TpuRates:
    """The speeds of a TPU's clock, memory and links, for `jaxdist.hlo.timeline`."""

    device: Device
    torus: Torus

    def cycles(self, count: int) -> float:
        """Return the time of `count` cycles, in seconds."""
        assert self.device.clock_hz
        return count / self.device.clock_hz

    def transfer(self, collective: Collective) -> tuple[float, frozenset[Resource]]:
        """Return the seconds of a collective whose links carry nothing else, and these links."""
        return self.torus.transfer(collective)

    def copy(self, size_bytes: int, *, host: bool) -> float:
        """Return the seconds of a copy, within the device's memory or to or from the host."""
        host_rate = self.device.host_bytes_per_second
        rate = host_rate if host and host_rate else self.device.memory_bytes_per_second
        return size_bytes / rate

    def work(self, effort: Effort) -> tuple[float, str]:
        """Return the seconds of a kernel's work, and the assumption about its rate as text.

        The seconds are the larger of the time for FLOPs and the time for bytes.
        """
        flops, share, assumption = kernel_work(effort, self.device.name)
        compute = flops / (self.device.flops_per_second["bfloat16"] * share)
        memory = effort.bytes / self.device.memory_bytes_per_second
        return max(compute, memory), (
            assumption if compute > memory else f"{effort.what}: bytes at memory bandwidth"
        )


def can_predict(devices: Sequence[Any]) -> bool:
    """Return whether step times can be predicted for these devices.

    The clock of the devices must be known, and their compiler must write estimates.
    """
    known = find_device(devices[0].device_kind)
    return known is not None and known.clock_hz is not None


def step_time(
    module: Module,
    layout: MeshLayout,
    devices: Sequence[Any],
    lockstep: Lockstep | None = None,
) -> StepTime:
    """Predict the time of a run of a program.

    Args:
      module: the scheduled program with the compiler's estimates.
      layout: the layout of the mesh that the program was compiled for.
      devices: the mesh's devices, flattened; `can_predict` must be true for them.
      lockstep: the branches that a pipeline's stages take in each tick, or None without a pipeline.
    """
    rates = _rates(devices, layout)
    unmatched = mismatch(module, lockstep) if lockstep else None
    ticks = None if unmatched else lockstep
    timeline = play(module, layout, rates, lockstep=ticks)
    low = timeline
    # Without unknown branches a second simulation would give the same result.
    if timeline.has_branches:
        low = play(module, layout, rates, dearest=False, lockstep=ticks)
    found = _split(timeline, low.seconds)
    if lockstep is None:
        return found
    schedule = f"{lockstep.name}, {lockstep.ticks} ticks" if ticks else ""
    return dataclasses.replace(found, schedule=schedule, unmatched=unmatched or "")


def _rates(devices: Sequence[Any], layout: MeshLayout) -> TpuRates:
    device = find_device(devices[0].device_kind)
    assert device is not None, devices[0].device_kind
    assert device.clock_hz, f"{device.name} has no clock"
    # Collectives name positions in the program's device assignment, not positions on the mesh.
    assigned = [devices[index] for index in layout.order]
    return TpuRates(device, torus_of(assigned, device.name, device.fast, device.slow))


def _split(timeline: ProgramTimeline, seconds_low: float) -> StepTime:
    """Split the seconds of a timeline into compute and the different kinds of waits."""
    entries = sorted(timeline.entries.values(), key=lambda entry: -entry.waited_seconds)
    links = [entry for entry in entries if entry.basis == "links"]
    return StepTime(
        seconds=timeline.seconds,
        seconds_low=seconds_low,
        compute_seconds=_waited(e for e in entries if e.basis in ("compiler", "assumed")),
        assumed_seconds=_waited(e for e in entries if e.basis == "assumed"),
        copy_seconds=_waited(e for e in entries if e.basis == "copy"),
        exposed_seconds=_by_axes(links, lambda e: e.waited_seconds),
        overlapped_seconds=_by_axes(links, lambda e: max(0.0, e.seconds - e.waited_seconds)),
        entries=tuple(entries),
        unknown_loops=timeline.unknown_loops,
        bubble_seconds=_waited(e for e in entries if e.basis == "schedule"),
    )


def _waited(entries: Iterable[Entry]) -> float:
    return math.fsum(entry.waited_seconds for entry in entries)


def _by_axes(entries: Iterable[Entry], seconds: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for entry in entries:
        label = "other groups" if entry.axes is None else " x ".join(entry.axes)
        found[label] = found.get(label, 0.0) + seconds(entry)
    return found
