"""A fleet of devices that fail, in virtual time: what of it is work that is kept.

All devices work together, so that one failure stops all. Failures come at random at one rate,
whatever the fleet does. Work is saved in up to two tiers: often in the memory of hosts, each with a
copy at another host, and now and then on disk. A failure takes the work since the last save; with a
given chance it takes both copies in memory, and the fleet goes back to the last save on disk.

What is left out: a host that waits for a spare, failures that come together or more often when new,
and steps: work is taken to flow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat

from jaxdist.config.schema import Config, Count
from jaxdist.heartbeat import intervals
from jaxdist.metrics.account import Kind

Chance = Annotated[float, Field(ge=0, le=1)]


class FleetConfig(Config):
    """A fleet, what fails of it, and how long each thing takes that follows.

    The defaults are Llama 3's fleet; what its report does not tell is of the sources named.
    """

    devices: Count = 16_384
    """All work together. Llama 3 405B's (arXiv 2407.21783, section 3.3.4)."""
    failures_per_1000_device_days: PositiveFloat = 0.5267
    """Interruptions: 466 in 54 days of 16,384 devices (the same place)."""
    days: PositiveFloat = 54.0
    """How long the fleet runs (the same place)."""
    detect_seconds: NonNegativeFloat = 100.0
    """From a failure until it is known: jax's default for a heartbeat that is missed."""
    restart_seconds: NonNegativeFloat = 380.0
    """Until all processes are up again. With detection and loading 10 minutes: what a failure cost
    before fault tolerance in arXiv 2602.00277."""
    restore_seconds: NonNegativeFloat = 120.0
    """Loading a checkpoint from disk. A guess."""
    memory_restore_seconds: NonNegativeFloat = 10.0
    """Loading a snapshot from the memory of hosts. A guess."""
    checkpoint_seconds: NonNegativeFloat = 60.0
    """Work stands still so long for a checkpoint on disk: the usual example (arXiv 2410.21680)."""
    snapshot_seconds: NonNegativeFloat = 1.0
    """Work stands still so long for a snapshot in memory. A guess; GEMINI (SOSP 2023) hides it."""
    both_copies_lost: Chance = 0.084
    """The share of failures that take a snapshot and its copy too: those of switches and cables
    were 35 of Llama 3's 419 unexpected ones, where host and copy hang on one switch."""
    checkpoint_every_seconds: PositiveFloat | None = None
    """Work between checkpoints on disk where there are snapshots too; null: Young's interval for
    the failures that need one."""
    runs: Count = 20
    """Simulated runs of each interval; all intervals meet the same failures."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the failures."""

    @property
    def mttf(self) -> float:
        """Mean seconds between two failures."""
        return intervals.mttf_of(self.devices, self.failures_per_1000_device_days / 1000)

    @property
    def recovery(self) -> float:
        """Seconds from a failure until work goes on, from disk."""
        return self.detect_seconds + self.restart_seconds + self.restore_seconds

    @property
    def memory_recovery(self) -> float:
        """The same from memory."""
        return self.detect_seconds + self.restart_seconds + self.memory_restore_seconds

    @property
    def checkpoint_every(self) -> float:
        """Work between checkpoints on disk where there are snapshots too, in seconds."""
        if self.checkpoint_every_seconds is not None:
            return self.checkpoint_every_seconds
        needed = max(self.both_copies_lost, 1e-9)
        longest = self.days * intervals.DAY_SECONDS
        return min(intervals.young(self.checkpoint_seconds, self.mttf / needed), longest)


@dataclass(frozen=True)
class Saves:
    """How a fleet saves.

    Attributes:
      every: seconds of work between two saves.
      disk: each so many is a checkpoint on disk, the others are snapshots; 1 has no snapshots.
    """

    every: float
    disk: int = 1


@dataclass(frozen=True)
class Simulated:
    """What runs with one way to save gave.

    Attributes:
      seconds: by kind, float64 [runs]; they add up to the length of the runs.
      failures: int64 [runs].
    """

    saves: Saves
    seconds: Mapping[Kind, np.ndarray]
    failures: np.ndarray

    @property
    def goodput(self) -> np.ndarray:
        """The share of each run that is work which was kept, float64 [runs]."""
        return self.seconds[Kind.STEP] / sum(self.seconds.values())

    @property
    def shares(self) -> dict[Kind, float]:
        """Of each kind, over all runs."""
        whole = sum(float(spent.sum()) for spent in self.seconds.values())
        return {kind: float(spent.sum()) / whole for kind, spent in self.seconds.items()}


def snapshots_with(fleet: FleetConfig, every: float) -> Saves:
    """Saves in two tiers: a snapshot each `every` seconds, checkpoints about as often as asked."""
    return Saves(every, max(round(fleet.checkpoint_every / every), 1))


def first_order(fleet: FleetConfig, saves: Saves) -> float:
    """The goodput of two tiers to first order in what is lost (arXiv 2410.21680, equation 1).

    Work stands still for saves; a failure costs recovery and half of what lies between two saves:
    of snapshots, or with the chance that both copies are lost, of checkpoints.
    """
    lost_both = 1.0 if saves.disk == 1 else fleet.both_copies_lost
    stands = fleet.snapshot_seconds * (saves.disk - 1) + fleet.checkpoint_seconds
    recovery = lost_both * fleet.recovery + (1 - lost_both) * fleet.memory_recovery
    between = lost_both * saves.disk + 1 - lost_both
    failure = recovery + between * saves.every / 2
    return (1 - failure / fleet.mttf) / (1 + stands / (saves.disk * saves.every))


def simulate(fleet: FleetConfig, ways: Sequence[Saves]) -> list[Simulated]:
    """Run a fleet with each of these ways to save, against the same failures.

    Cost: a few numpy operations on [ways, runs] for each failure of a run.
    """
    rng = np.random.default_rng(fleet.seed)
    state = _State(fleet, ways)
    horizon, now = fleet.days * intervals.DAY_SECONDS, np.zeros(fleet.runs)
    failures = np.zeros(fleet.runs, np.int64)
    while (now < horizon).any():
        gap, left = rng.exponential(fleet.mttf, fleet.runs), horizon - now
        dies = gap < left
        gap = np.minimum(gap, left)
        now = np.where(dies, now + gap, horizon)
        failures += dies
        state.advance(gap, dies, rng.random(fleet.runs) < fleet.both_copies_lost)
    return [
        Simulated(way, {kind: spent[at] for kind, spent in state.seconds.items()}, failures)
        for at, way in enumerate(ways)
    ]


class _State:
    """Where each way [ways] stands in each run [runs], and what its time went to."""

    def __init__(self, fleet: FleetConfig, ways: Sequence[Saves]) -> None:
        shape = (len(ways), fleet.runs)
        self.fleet = fleet
        self.every = np.array([[way.every] for way in ways])
        self.disk = np.array([[way.disk] for way in ways])
        self.seconds = {
            kind: np.zeros(shape)
            for kind in (
                *(Kind.STEP, Kind.CHECKPOINT_BLOCKED, Kind.SNAPSHOT),
                *(Kind.RECOVERY, Kind.LOST_WORK, Kind.IDLE),
            )
        }
        self.saved = np.zeros(shape, np.int64)
        """Snapshots since the last checkpoint."""
        self.detecting, self.restoring = np.zeros(shape), np.zeros(shape)
        """What is ahead before work goes on; nothing at first."""
        self.from_disk = np.zeros(shape, bool)

    def advance(self, gap: np.ndarray, dies: np.ndarray, both: np.ndarray) -> None:
        """So many seconds until the next failure, or until the end where nothing dies.

        Args:
          gap: seconds, float64 [runs].
          dies: whether there is a failure then, bool [runs].
          both: whether it takes both copies of a snapshot, bool [runs].
        """
        detected = np.minimum(gap, self.detecting)
        restored = np.minimum(gap - detected, self.restoring)
        recovered = detected + restored == self.detecting + self.restoring
        saved, undone, kept = self._work(gap - detected - restored)
        disk = dies & (both | (self.disk == 1))
        lost = np.where(dies, undone, 0.0) + np.where(disk, saved * self.every, 0.0)
        self.seconds[Kind.IDLE] += detected
        self.seconds[Kind.RECOVERY] += restored
        self.seconds[Kind.LOST_WORK] += lost
        self.seconds[Kind.STEP] += kept + undone - lost
        self.saved = np.where(disk, 0, saved)
        # A load from disk that a failure cut short begins anew.
        self.from_disk = disk | (self.from_disk & ~recovered)
        self._fall(dies)

    def _work(self, up: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """After so many seconds: snapshots since the last checkpoint, work since the last save, and
        work that was saved, both in seconds."""
        fleet, every, disk = self.fleet, self.every, self.disk
        period = every + fleet.snapshot_seconds
        cycle = disk * every + (disk - 1) * fleet.snapshot_seconds + fleet.checkpoint_seconds
        # A microsecond more, so that what was saved stays so whatever is rounded.
        cycles, rest = np.divmod(self.saved * period + up + 1e-6, cycle)
        saved = np.minimum(rest // period, disk - 1).astype(np.int64)
        left = np.clip(rest - saved * period - 1e-6, 0.0, None)
        undone = np.minimum(left, every)
        kept = (cycles * disk + saved - self.saved) * every
        stood = cycles * fleet.checkpoint_seconds
        stood += np.where(saved == disk - 1, left - undone, 0.0)
        self.seconds[Kind.CHECKPOINT_BLOCKED] += stood
        self.seconds[Kind.SNAPSHOT] += np.maximum(up - kept - undone - stood, 0.0)
        return saved, undone, kept

    def _fall(self, dies: np.ndarray) -> None:
        fleet = self.fleet
        load = np.where(self.from_disk, fleet.restore_seconds, fleet.memory_restore_seconds)
        self.detecting = np.where(dies, fleet.detect_seconds, 0.0)
        self.restoring = np.where(dies, fleet.restart_seconds + load, 0.0)
