"""The command `jaxdist simulate fleet`: the goodput of a fleet over the interval between saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from jaxdist.heartbeat import intervals
from jaxdist.metrics.account import Activity
from jaxdist.simulation.failing_fleet import (
    FleetConfig,
    Saves,
    Simulated,
    first_order,
    simulate_fleet,
    snapshots_with,
)
from jaxdist.simulation.fleet_plot import plot_fleet
from jaxdist.study.files import check_writable, read_settings, write_study
from jaxdist.types import JsonObject

POWERS = range(-8, 5)
"""The powers of two by which Young's interval for checkpoints is multiplied."""
_BESTS = {"Young": intervals.young, "Daly": intervals.daly}


@dataclass(frozen=True)
class SaveTier:
    """A kind of saves, which is simulated at each interval.

    Attributes:
      name: the name of the kind of saves, for tables and pictures.
      cost: the seconds for which a save blocks training, for the kind of save whose interval
        varies.
      rows: the simulated runs of each interval, the shortest interval first.
      formula: the goodput of each row by a closed form.
    """

    name: str
    cost: float
    rows: tuple[Simulated, ...]
    formula: tuple[float, ...]

    @property
    def means(self) -> list[float]:
        """The simulated goodput at each interval, over all runs with this interval."""
        return [row.shares[Activity.STEP] for row in self.rows]

    @property
    def best(self) -> Simulated:
        """The simulated runs at the interval with the largest goodput."""
        return self.rows[int(np.argmax(self.means))]


@dataclass(frozen=True)
class Fleet:
    """The results of a simulated fleet, for each interval between saves.

    Attributes:
      tiers: checkpoints alone, and checkpoints with snapshots in memory; the two tiers have rows
        for the same intervals.
    """

    config: FleetConfig
    tiers: tuple[SaveTier, SaveTier]

    @property
    def every(self) -> list[float]:
        """The simulated intervals: seconds of work between two saves."""
        return [row.saves.every for row in self.tiers[0].rows]

    def marks(self, tier: SaveTier) -> dict[str, float]:
        """Return the best interval in seconds by each formula, or {} if saves cost no time."""
        found = _BESTS if tier.cost else {}
        return {name: best(tier.cost, self.config.mttf) for name, best in found.items()}

    def text(self) -> str:
        """Return the results as tables, at most 80 columns wide."""
        return "\n".join([*_head(self.config), "", *self._sweep(), "", *self._accounts()])

    def _sweep(self) -> list[str]:
        alone, both = self.tiers
        lines = [
            f"{'a save':>9}  {alone.name:<33} {both.name}",
            f"{'each':>9}  {'goodput':>7} {'formula':>8} {'':<16} {'goodput':>7} {'formula':>8}",
        ]
        for at, every in enumerate(self.every):
            cells = "  ".join(
                f"{tier.means[at]:>7.1%} {max(tier.formula[at], 0):>8.1%} "
                f"{self._said(tier, at):<14}"
                for tier in self.tiers
            )
            lines.append(f"{every:>7,.0f} s  {cells}".rstrip())
        return lines

    def _said(self, tier: SaveTier, at: int) -> str:
        # `sweep` put exactly these floats among the intervals, so the comparison for equality is
        # exact.
        names = [name for name, best in self.marks(tier).items() if best == self.every[at]]
        best = ["best"] if tier.rows[at] is tier.best else []
        return ", ".join([*best, *names])

    def _accounts(self) -> list[str]:
        lines = ["use of the time at the best interval of each method:"]
        for kind in self.tiers[0].best.seconds:
            shares = [tier.best.shares[kind] for tier in self.tiers]
            name = "detection" if kind is Activity.IDLE else kind.replace("_", " ")
            lines.append(f"  {name:<20} {shares[0]:>8.1%} {shares[1]:>27.1%}")
        return lines

    def as_json(self) -> JsonObject:
        """Return the results as plain data: the text, the config, and every interval's results."""
        return {
            "text": self.text().splitlines(),
            "config": self.config.model_dump(mode="json"),
            "mttf_seconds": self.config.mttf,
            "tiers": [
                {
                    "name": tier.name,
                    "marks_seconds": self.marks(tier),
                    "best_seconds": tier.best.saves.every,
                    "rows": [
                        _row(row, formula)
                        for row, formula in zip(tier.rows, tier.formula, strict=True)
                    ],
                }
                for tier in self.tiers
            ],
        }


def _row(row: Simulated, formula: float) -> JsonObject:
    low, high = np.percentile(row.goodput, [5, 95]).tolist()
    return {
        "every_seconds": row.saves.every,
        "saves_per_checkpoint": row.saves.disk,
        "goodput": row.shares[Activity.STEP],
        "goodput_5": low,
        "goodput_95": high,
        "formula": formula,
        "failures": row.failures.tolist(),
        "shares": {kind.value: share for kind, share in row.shares.items()},
    }


def _head(config: FleetConfig) -> list[str]:
    failures = config.days * intervals.DAY_SECONDS / config.mttf
    return [
        f"fleet  {config.devices:,} devices, a failure every {config.mttf / 3600:.2f} h: "
        f"{failures:,.0f} in {config.days:g} days; {config.runs} runs, seed {config.seed}",
        f"  a failure: {config.detect_seconds:g} s to detect, {config.restart_seconds:g} s to "
        f"restart, {config.restore_seconds:g} s to load (memory: "
        f"{config.memory_restore_seconds:g} s)",
        f"  a save: {config.checkpoint_seconds:g} s to disk, {config.snapshot_seconds:g} s to "
        f"memory ({config.both_copies_lost:.1%} of failures destroy both copies)",
        f"  besides snapshots, a checkpoint is saved every {config.checkpoint_every / 3600:.2f} h",
    ]


def run_fleet(
    settings: Sequence[str],
    *,
    json_file: Path | None = None,
    plot: Path | None = None,
    console: Console,
) -> Fleet:
    """Simulate a fleet; print, write and return the results.

    The same settings give the same numbers.

    Args:
      settings: an optional path of a YAML file of `FleetConfig`, followed by texts `key=value`.
      json_file, plot: the file for the results and the directory for the pictures; None writes
        nothing.

    Raises:
      JaxdistError: a setting is unknown or invalid, or a file cannot be written.
    """
    config = read_settings(settings, FleetConfig)
    check_writable(plot, json_file)
    done = sweep(config)
    console.print(done.text(), soft_wrap=True, markup=False)
    write_study(json_file, done.as_json())
    if plot is not None:
        plot_fleet(done, plot)
    return done


def sweep(config: FleetConfig) -> Fleet:
    """Return the simulated goodput at each interval, for checkpoints alone and with snapshots."""
    costs = config.checkpoint_seconds, config.snapshot_seconds
    bests = [best(cost, config.mttf) for cost in costs for best in _BESTS.values() if cost]
    # A cost of at least one second is assumed, because with a cost of zero Young's interval and its
    # multiples would be zero.
    middle = intervals.young(max(costs[0], 1.0), config.mttf)
    every = sorted({*(middle * 2.0**power for power in POWERS), *bests})
    alone = [Saves(seconds) for seconds in every]
    both = [snapshots_with(config, seconds) for seconds in every]
    found = simulate_fleet(config, [*alone, *both])
    exact = [
        intervals.goodput(seconds, costs[0], config.mttf, config.recovery) for seconds in every
    ]
    pairs = zip(both, exact, strict=True)
    rough = [first_order(config, way) if way.disk > 1 else known for way, known in pairs]
    return Fleet(
        config,
        (
            SaveTier("checkpoints alone", costs[0], tuple(found[: len(every)]), tuple(exact)),
            SaveTier(
                "with snapshots in memory", costs[1], tuple(found[len(every) :]), tuple(rough)
            ),
        ),
    )
