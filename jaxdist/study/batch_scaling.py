"""`jaxdist study batch-scaling`: optimizers at growing batch sizes, by one rule and tuned."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from jaxdist.data.cache import cache_directory
from jaxdist.errors import ConfigError, RunError
from jaxdist.experiment import Experiment, load
from jaxdist.runtime import compilation_cache
from jaxdist.study.optimizers import CONTENDERS, check_names
from jaxdist.study.plan import (
    FACTOR,
    RULE,
    TUNING_SEEDS,
    StudyCell,
    StudyPlan,
    parse_batches,
    run_plan,
)
from jaxdist.study.plot import plot_batch_scaling
from jaxdist.study.table import markdown, metric_of, verdict
from jaxdist.study.trainer import Trainer
from jaxdist.study.trial import Journal, Trial, TrialOutcome
from jaxdist.study.watch import Watch
from jaxdist.types import JsonObject

_FIXED = ("optim", "train.batch_size", "train.steps")


@dataclass(frozen=True)
class Study:
    """A study that is done.

    Attributes:
      caption: what was trained, on what, and how the learning rates were chosen.
      runs: all runs, those of the searches too.
    """

    caption: str
    cells: tuple[StudyCell, ...]
    runs: tuple[TrialOutcome, ...]

    def text(self) -> str:
        """Caption, table and verdict."""
        return "\n".join([self.caption, "", markdown(self.cells), "", *verdict(self.cells)])

    def as_json(self) -> JsonObject:
        """Plain data: the text, the cells with mean and spread, and every run."""
        cells = [
            {
                "optimizer": cell.optimizer,
                "batch_size": cell.batch_size,
                "tuned": cell.tuned,
                "learning_rate": cell.learning_rate,
                "mean": cell.mean if math.isfinite(cell.mean) else None,
                "spread": cell.spread if math.isfinite(cell.spread) else None,
                "diverged": cell.diverged,
            }
            for cell in self.cells
        ]
        return {
            "caption": self.caption,
            "metric": metric_of(self.cells),
            "table": markdown(self.cells).splitlines(),
            "verdict": verdict(self.cells),
            "contenders": {
                name: dict(CONTENDERS[name].section)
                for name in dict.fromkeys(cell.optimizer for cell in self.cells)
            },
            "cells": cells,
            "runs": [outcome.as_json() for outcome in self.runs],
        }


def batch_scaling(
    path: Path,
    overrides: Sequence[str],
    *,
    batches: str,
    optimizers: str,
    seeds: int,
    epochs: float | None,
    tune: bool,
    json_file: Path | None,
    plot: Path | None,
    console: Console,
) -> Study:
    """Train the config with each optimizer at each batch size; print and write what came of it.

    Finished runs are kept beside the output (or under runs/) and found again by the same command.

    Args:
      batches, optimizers: separated by commas.
      seeds: runs for each number in the table.
      epochs: length of every run; None takes the config's.
      tune: search for learning rates at every batch size too.
      json_file, plot: a file and a directory to write to.

    Raises:
      JaxdistError: a config, size or name that cannot be trained; files that cannot be written.
    """
    sizes = parse_batches(batches)
    names = tuple(name.strip() for name in optimizers.split(",") if name.strip())
    check_names(names)
    settings = _settings(path, overrides, epochs)
    trainer = Trainer(path, settings)
    _, config = load(path, settings)
    seeds_of = range(config.seed, config.seed + TUNING_SEEDS + seeds)
    experiments = trainer.check([Trial(names[0], size, seeds_of[-1], 1.0, 0) for size in sizes])
    experiment = experiments[0]
    plan = StudyPlan(
        optimizers=names,
        steps={size: e.total_steps for size, e in zip(sizes, experiments, strict=True)},
        seeds=tuple(seeds_of[TUNING_SEEDS:]),
        tuning_seeds=tuple(seeds_of[:TUNING_SEEDS]),
        tune=tune,
    )
    _check_writable(plot, json_file)
    journal = Journal(_journal_path(path, json_file, plot))
    compilation_cache.enable(cache_directory() / "compiled")
    cells, runs = _run(plan, trainer, journal, console)
    study = Study(_caption(experiment, plan), cells, runs)
    console.print(f"\n{study.text()}", soft_wrap=True, markup=False)
    if json_file is not None:
        _write(json_file, json.dumps(study.as_json(), indent=1, allow_nan=False) + "\n")
    if plot is not None:
        model, length = experiment.config.model.type, experiment.config.train.epochs
        title = f"{model} on {path.stem}, {length:g} epochs: mean, lowest and highest of {seeds}"
        plot_batch_scaling(cells, plot, title=f"{title} seeds")
    return study


def _settings(path: Path, overrides: Sequence[str], epochs: float | None) -> list[str]:
    """The overrides of every run."""
    for text in overrides:
        key = text.partition("=")[0].strip()
        if any(key == fixed or key.startswith(f"{fixed}.") for fixed in _FIXED):
            raise ConfigError(
                f"override {text!r} has no effect here: the study sets {', '.join(_FIXED)}; leave "
                "it out, and use --optimizers, --batches and --epochs"
            )
    if epochs is not None:
        return [*overrides, "train.steps=null", f"train.epochs={epochs}"]
    _, config = load(path, overrides)
    if config.train.epochs is None:
        raise ConfigError(
            f"{path} trains {config.train.steps} steps, but a study compares equal numbers of "
            "epochs: give --epochs"
        )
    return list(overrides)


def _journal_path(path: Path, json_file: Path | None, plot: Path | None) -> Path:
    if json_file is not None:
        return json_file.with_suffix(".runs.jsonl")
    return (plot or Path("runs")) / f"{path.stem}-batch-scaling.runs.jsonl"


def _run(
    plan: StudyPlan, trainer: Trainer, journal: Journal, console: Console
) -> tuple[tuple[StudyCell, ...], tuple[TrialOutcome, ...]]:
    runs: dict[str, TrialOutcome] = {}
    order = [size for size in plan.steps for _ in plan.optimizers]
    with Watch(order, console) as watch:

        def run(trial: Trial) -> TrialOutcome:
            key = trainer.identity(trial)
            outcome = runs.get(key) or journal.get(key)
            if outcome is None:
                watch.trial(trial)
                outcome = trainer(trial)
                journal.add(key, outcome)
            if key not in runs:
                runs[key] = outcome
                watch.took(outcome.seconds)
            return outcome

        cells: list[StudyCell] = []
        try:
            for found in run_plan(plan, run):
                watch.cells(found)
                cells += found
        except KeyboardInterrupt:
            console.print(
                f"{len(runs)} runs are kept in {journal.path}; the same command goes on",
                soft_wrap=True,
                markup=False,
            )
            raise
    return tuple(cells), tuple(runs.values())


def _caption(experiment: Experiment, plan: StudyPlan) -> str:
    devices = experiment.layout.mesh.devices
    shape = ", ".join(f"{axis}: {size}" for axis, size in experiment.layout.mesh.shape.items())
    accuracy = "accuracy" in experiment.program.metrics
    metric = "accuracy in percent" if accuracy else "loss in nats"
    return "\n".join(
        [
            f"{experiment.config.model.type} on {experiment.dataset.description}; "
            f"{experiment.config.train.epochs:g} epochs at each batch size; mesh {{{shape}}} on "
            f"{devices.size} x {devices.flat[0].device_kind}.",
            f"Held-out {metric} after the last step: mean ± sample standard deviation over "
            f"{len(plan.seeds)} seeds.",
            f"By rule: the best learning rate at batch {plan.base}, carried on by rule {RULE} "
            f"(sqrt of the batch; warm-up {100 * plan.warmup_fraction:.3g}% of the run x growth; "
            "linear decay to 0).",
            "Tuned: the best learning rate at each batch size, same warm-up and decay.",
            f"Rates are {FACTOR:g}x apart, chosen by the mean of {len(plan.tuning_seeds)} other "
            "seeds on the same held-out split; by chance a tuned mean can fall below the rule's.",
        ]
    )


def _check_writable(plot: Path | None, json_file: Path | None) -> None:
    """Not after the last run, but before the first."""
    for folder in {plot, json_file.parent if json_file else None} - {None}:
        assert folder is not None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise _unwritable(folder, error) from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: str | os.PathLike[str], error: OSError) -> RunError:
    return RunError(f"cannot write the study to {path}: {error.strerror}; choose another place")
