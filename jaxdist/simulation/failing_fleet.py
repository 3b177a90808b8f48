"""A simulation of a fleet whose devices fail: the share of useful work in the fleet's time.

All devices work together, so a single failure stops all of them. Failures are random, at a constant
rate. Work is saved in up to two tiers. Snapshots are frequent and stay in the memory of a host,
with a replica in the memory of another host. Checkpoints on disk are less frequent. A failure loses
the work since the last save. With a given probability, a failure destroys both copies of a
snapshot, and the fleet continues from the last checkpoint.

The simulation does not model the wait for a spare host, correlated failures, or the more frequent
failures of new hardware. Work is continuous, without separate steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat

from jaxdist.config.schema import Config, Count
from jaxdist.heartbeat import intervals
from jaxdist.metrics.account import Activity

Chance = Annotated[float, Field(ge=0, le=1)]


class FleetConfig(Config):
    """A fleet, its failures, and the time that each part of a recovery takes.

    The default fleet and its failures are from the training of Llama 3. For each time of a save or
    of a recovery, the field names the source of the default, or says that the default is a guess.
    """

    devices: Count = 16_384
    """The number of devices, which all work together. The default is the number for Llama 3 405B
    (arXiv 2407.21783, section 3.3.4)."""
    failures_per_1000_device_days: PositiveFloat = 0.5267
    """The number of interruptions per 1,000 devices and day. Llama 3 405B had 466 interruptions in
    54 days on 16,384 devices (arXiv 2407.21783)."""
    days: PositiveFloat = 54.0
    """The number of days that the fleet runs. The default is from arXiv 2407.21783."""
    detect_seconds: NonNegativeFloat = 100.0
    """The time from a failure until it is detected. The default is JAX's default timeout for a
    missed heartbeat."""
    restart_seconds: NonNegativeFloat = 380.0
    """The time from the detection until all processes run again. By default detection, restart and
    loading together take 10 minutes, as a failure does in arXiv 2602.00277 before its methods for
    fault tolerance."""
    restore_seconds: NonNegativeFloat = 120.0
    """The time to load a checkpoint from disk. The default is a guess."""
    memory_restore_seconds: NonNegativeFloat = 10.0
    """The time to load a snapshot from the memory of hosts. The default is a guess."""
    checkpoint_seconds: NonNegativeFloat = 60.0
    """The time that a checkpoint on disk blocks training. The default is the usual example (arXiv
    2410.21680)."""
    snapshot_seconds: NonNegativeFloat = 1.0
    """The time that a snapshot in memory blocks training. The default is a guess; GEMINI (SOSP
    2023) overlaps snapshots with training."""
    both_copies_lost: Chance = 0.084
    """The share of failures that destroy a snapshot and its replica. The default assumes that a
    host and its replica share a switch: switches and cables caused 35 of Llama 3's 419 unexpected
    failures."""
    checkpoint_every_seconds: PositiveFloat | None = None
    """The seconds of work between checkpoints on disk when there are snapshots too; null takes
    Young's interval for the failures that need a checkpoint."""
    runs: Count = 20
    """The number of simulated runs for each interval between saves. Run number i has the same
    failures for every interval."""
    seed: Annotated[int, Field(ge=0)] = 0
    """The seed of the failures."""

    @property
    def mttf(self) -> float:
        """The mean seconds between two failures."""
        return intervals.mttf_of(self.devices, self.failures_per_1000_device_days / 1000)

    @property
    def recovery(self) -> float:
        """The seconds from a failure until work continues from disk."""
        return self.detect_seconds + self.restart_seconds + self.restore_seconds

    @property
    def memory_recovery(self) -> float:
        """The seconds from a failure until work continues from memory."""
        return self.detect_seconds + self.restart_seconds + self.memory_restore_seconds

    @property
    def checkpoint_every(self) -> float:
        """The seconds of work between checkpoints on disk when there are snapshots too."""
        if self.checkpoint_every_seconds is not None:
            return self.checkpoint_every_seconds
        # With a chance of zero, no checkpoints are needed: the interval is then the length of the
        # run.
        needed = max(self.both_copies_lost, 1e-9)
        longest = self.days * intervals.DAY_SECONDS
        return min(intervals.young(self.checkpoint_seconds, self.mttf / needed), longest)


@dataclass(frozen=True)
class Saves:
    """The interval and the tiers of a fleet's saves.

    Attributes:
      every: the seconds of work between two saves.
      disk: the number of saves from one checkpoint on disk to the next. The saves between two
        checkpoints are snapshots. With 1 there are no snapshots.
    """

    every: float
    disk: int = 1


@dataclass(frozen=True)
class Simulated:
    """The results of all runs with the same interval and tiers of saves.

    Attributes:
      seconds: the time by kind, float64 [runs]; the times of all kinds add up to the length of a
        run.
      failures: the number of failures, int64 [runs].
    """

    saves: Saves
    seconds: Mapping[Activity, np.ndarray]
    failures: np.ndarray

    @property
    def goodput(self) -> np.ndarray:
        """The share of kept work in the time of each run, float64 [runs]."""
        return self.seconds[Activity.STEP] / sum(self.seconds.values())

    @property
    def shares(self) -> dict[Activity, float]:
        """The share of each kind of time in the time of all runs together."""
        whole = sum(float(spent.sum()) for spent in self.seconds.values())
        return {kind: float(spent.sum()) / whole for kind, spent in self.seconds.items()}


def snapshots_with(fleet: FleetConfig, every: float) -> Saves:
    """Return a plan that saves a snapshot every `every` seconds, and checkpoints as configured."""
    return Saves(every, max(round(fleet.checkpoint_every / every), 1))


def first_order(fleet: FleetConfig, saves: Saves) -> float:
    """Return the goodput of saves in two tiers, to first order in the lost time.

    The formula is equation 1 of arXiv 2410.21680.

    Saves block training. A failure costs the recovery and half an interval. The interval is
    the interval between checkpoints if both copies are lost, and between snapshots otherwise.
    """
    lost_both = 1.0 if saves.disk == 1 else fleet.both_copies_lost
    stands = fleet.snapshot_seconds * (saves.disk - 1) + fleet.checkpoint_seconds
    recovery = lost_both * fleet.recovery + (1 - lost_both) * fleet.memory_recovery
    between = lost_both * saves.disk + 1 - lost_both
    failure = recovery + between * saves.every / 2
    return (1 - failure / fleet.mttf) / (1 + stands / (saves.disk * saves.every))


def simulate_fleet(fleet: FleetConfig, ways: Sequence[Saves]) -> list[Simulated]:
    """Simulate a fleet with each of the given kinds of saves, under the same failures.

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
    """The state and the times of all runs with each kind of saves, as arrays `[ways, runs]`.

    The first dim counts the kinds of saves (`Saves`).
    """

    def __init__(self, fleet: FleetConfig, ways: Sequence[Saves]) -> None:
        shape = (len(ways), fleet.runs)
        self.fleet = fleet
        self.every = np.array([[way.every] for way in ways])
        self.disk = np.array([[way.disk] for way in ways])
        self.seconds = {
            kind: np.zeros(shape)
            for kind in (
                *(Activity.STEP, Activity.CHECKPOINT_BLOCKED, Activity.SNAPSHOT),
                *(Activity.RECOVERY, Activity.LOST_WORK, Activity.IDLE),
            )
        }
        self.saved = np.zeros(shape, np.int64)
        """The number of snapshots since the last checkpoint."""
        self.detecting, self.restoring = np.zeros(shape), np.zeros(shape)
        """The remaining seconds of detection, and of restart and loading, before work continues."""
        self.from_disk = np.zeros(shape, bool)

    def advance(self, gap: np.ndarray, dies: np.ndarray, both: np.ndarray) -> None:
        """Advance all runs to the next failure, or to the end of a run without another failure.

        Args:
          gap: the seconds to advance, float64 [runs].
          dies: whether a failure follows, bool [runs].
          both: whether that failure destroys both copies of a snapshot, bool [runs].
        """
        detected = np.minimum(gap, self.detecting)
        restored = np.minimum(gap - detected, self.restoring)
        # The comparison is exact, since a minimum is one of its two arguments.
        recovered = detected + restored == self.detecting + self.restoring
        saved, undone, kept = self._work(gap - detected - restored)
        disk = dies & (both | (self.disk == 1))
        lost = np.where(dies, undone, 0.0) + np.where(disk, saved * self.every, 0.0)
        self.seconds[Activity.IDLE] += detected
        self.seconds[Activity.RECOVERY] += restored
        self.seconds[Activity.LOST_WORK] += lost
        self.seconds[Activity.STEP] += kept + undone - lost
        self.saved = np.where(disk, 0, saved)
        # If a failure interrupts a load from disk, the load starts again.
        self.from_disk = disk | (self.from_disk & ~recovered)
        self._fall(dies)

    def _work(self, up: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Advance the work by `up` seconds.

        Return the number of snapshots since the last checkpoint, the work since the last save, and
        the work that was saved. Work is in seconds.
        """
        fleet, every, disk = self.fleet, self.every, self.disk
        period = every + fleet.snapshot_seconds
        cycle = disk * every + (disk - 1) * fleet.snapshot_seconds + fleet.checkpoint_seconds
        # One microsecond is added, because rounding could make a finished save look unfinished.
        cycles, rest = np.divmod(self.saved * period + up + 1e-6, cycle)
        saved = np.minimum(rest // period, disk - 1).astype(np.int64)
        left = np.clip(rest - saved * period - 1e-6, 0.0, None)
        undone = np.minimum(left, every)
        kept = (cycles * disk + saved - self.saved) * every
        # The time that remains after a cycle's last interval belongs to the cycle's unfinished
        # checkpoint.
        stood = cycles * fleet.checkpoint_seconds
        stood += np.where(saved == disk - 1, left - undone, 0.0)
        self.seconds[Activity.CHECKPOINT_BLOCKED] += stood
        self.seconds[Activity.SNAPSHOT] += np.maximum(up - kept - undone - stood, 0.0)
        return saved, undone, kept

    def _fall(self, dies: np.ndarray) -> None:
        fleet = self.fleet
        load = np.where(self.from_disk, fleet.restore_seconds, fleet.memory_restore_seconds)
        self.detecting = np.where(dies, fleet.detect_seconds, 0.0)
        self.restoring = np.where(dies, fleet.restart_seconds + load, 0.0)
