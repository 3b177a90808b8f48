"""The command `jaxdist simulate CONFIG`: a single run, or variants side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console

from jaxdist.data.cache import cache_directory
from jaxdist.experiment import Experiment, build, load
from jaxdist.experiment.config import at_setting
from jaxdist.runtime import compilation_cache
from jaxdist.simulation.compared import SimulatedVariant, Targets, default_targets, variants_table
from jaxdist.simulation.engine.report import Report
from jaxdist.simulation.engine.table import simulation_table as report_table
from jaxdist.simulation.plot import plot_simulation
from jaxdist.simulation.simulated import Simulator, cluster_of
from jaxdist.study.compare import check_alike
from jaxdist.study.files import check_writable
from jaxdist.study.runs import publish
from jaxdist.study.variants import AS_GIVEN, Variant, parse_variants
from jaxdist.types import JsonObject


@dataclass(frozen=True)
class SimulationResult:
    """The result of `jaxdist simulate CONFIG`.

    Attributes:
      caption: a sentence about the model, its data and the cluster.
      targets: for each seed, the loss to which the time of a run is measured.
      rows: the runs of each variant; the other variants are compared with the first variant.
    """

    caption: str
    targets: Targets
    rows: tuple[SimulatedVariant, ...]

    def text(self) -> str:
        """Return the table of variants, or the report of a single run."""
        if len(self.rows) == len(self.rows[0].reports) == 1:
            return "\n".join([self.caption, "", report_table(self.rows[0].reports[0])])
        settings = [f"{row.variant.name}: {' '.join(row.variant.overrides)}" for row in self.rows]
        goals = ", ".join(f"{target:.4f}" for target in self.targets)
        told = (
            f"Target: held-out loss {goals} by seed. Mean over {len(self.targets)} seeds "
            "(spread: their standard deviation)."
        )
        return "\n".join(
            [self.caption, told, "", variants_table(self.rows, self.targets), "", *settings]
        )

    def as_json(self) -> JsonObject:
        """Return the simulations as plain data: the text, and every run."""
        return {
            "text": self.text().splitlines(),
            "targets": [target if math.isfinite(target) else None for target in self.targets],
            "variants": [row.as_json(self.targets) for row in self.rows],
        }


def run_simulation(
    path: Path,
    overrides: Sequence[str],
    *,
    variants: Sequence[str],
    seeds: int,
    target: float | None,
    json_file: Path | None,
    plot: Path | None,
    console: Console,
) -> SimulationResult:
    """Simulate training in virtual time; print, write and return the results.

    The same command gives the same bits.

    Args:
      variants: the variants, as `jaxdist.study.variants.parse_variants` reads them; if empty, only
        CONFIG is simulated.
      seeds: the number of runs of each variant; run i adds i to the config's seed and to the seed
        of `strategy.simulation`.
      target: the held-out loss to which the time of a run is measured; None takes, for each seed, a
        loss 1% above the last loss of the first variant.
      json_file, plot: the file for the results and the directory for the pictures; None writes
        nothing.

    Raises:
      JaxdistError: a config cannot be simulated, or a file cannot be written.
    """
    found = parse_variants(variants, taken=[]) or (AS_GIVEN,)
    experiments = {variant: _experiment(path, overrides, variant, 0) for variant in found}
    first = experiments[found[0]]
    for one in found:
        # The strategy may differ, but the runs of a seed must draw the same numbers.
        check_alike(one.name, experiments[one], first, "seed")
    # A file that cannot be written is refused here, before a simulation that may take long.
    check_writable(plot, json_file)
    compilation_cache.enable(cache_directory() / "compiled")
    for notice in dict.fromkeys(n for one in experiments.values() for n in one.notices):
        console.print(f"[bold yellow]warning:[/] {notice}", soft_wrap=True)
    rows = _rows(path, overrides, found, seeds, console)
    targets = default_targets(rows[0]) if target is None else (target,) * seeds
    done = SimulationResult(caption_of(first), targets, rows)
    publish(done.text(), done.as_json(), json_file, console)
    if plot is not None:
        title = f"{first.config.model.type} on {path.stem}, seed {rows[0].seeds[0]}"
        plot_simulation(rows, plot, title=title, target=targets[0])
    return done


def _rows(
    path: Path,
    overrides: Sequence[str],
    variants: Sequence[Variant],
    seeds: int,
    console: Console,
) -> tuple[SimulatedVariant, ...]:
    """Return a row for each variant.

    The outer loop is over seeds, so that all variants of a seed use the same data and programs.
    """
    simulator = Simulator()
    reports: dict[Variant, list[Report]] = {variant: [] for variant in variants}
    _, config = load(path, overrides)
    numbers = tuple(config.seed + seed for seed in range(seeds))
    for seed, variant in product(range(seeds), variants):
        report = simulator(_experiment(path, overrides, variant, seed))
        reports[variant].append(report)
        if seeds * len(variants) > 1:
            console.print(
                f"{variant.name}, seed {numbers[seed]}: loss {report.loss:.4f} after "
                f"{report.seconds:.4g} virtual seconds"
            )
    return tuple(
        SimulatedVariant(variant, numbers, tuple(reports[variant])) for variant in variants
    )


def _experiment(path: Path, overrides: Sequence[str], variant: Variant, seed: int) -> Experiment:
    given = [*overrides, *variant.overrides]
    document, config = load(path, given)
    with at_setting(document, "strategy"):
        cluster = cluster_of(config)
    if seed:
        script = cluster.simulation.seed
        more = [f"seed={config.seed + seed}", f"strategy.simulation.seed={script + seed}"]
        document, config = load(path, [*given, *more])
    return build(config, document)


def caption_of(experiment: Experiment) -> str:
    """Return a sentence about the model, its data and the cluster."""
    config, cluster = experiment.config, cluster_of(experiment.config)
    return (
        f"{config.model.type} on {experiment.dataset.description}; {config.optim.type}, "
        f"{experiment.total_steps:,} steps of {config.train.batch_size} examples, shared by "
        f"{cluster.workers} workers; {cluster.servers} servers."
    )
