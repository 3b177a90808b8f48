"""`jaxdist study batch-scaling`: optimizers at growing batch sizes.

Learning rates are scaled by a rule, and are also tuned by a search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from jaxdist.errors import ConfigError
from jaxdist.experiment import Experiment, load
from jaxdist.metrics.figure import save_figure
from jaxdist.study.definition import BatchScalingStudy, Contender
from jaxdist.study.files import check_writable, journal_path
from jaxdist.study.plan import (
    FACTOR,
    RULE,
    TUNING_SEEDS,
    StudyCell,
    StudyPlan,
    run_plan,
)
from jaxdist.study.plot import batch_scaling_figure
from jaxdist.study.runs import publish, runs_of, trained_on
from jaxdist.study.table import format_cell, metric_of, study_table, verdict
from jaxdist.study.trainer import Trainer
from jaxdist.study.trial import OutcomeJournal, Trial, TrialOutcome, finite
from jaxdist.types import JsonObject

_FIXED = ("optim", "train.batch_size", "train.steps")


@dataclass(frozen=True)
class Study:
    """The results of a batch-scaling study.

    Attributes:
      caption: a description of the model, the data and the choice of learning rates.
      contenders: the optimizers by name.
      cells: the results of each optimizer at each batch size.
      runs: all runs, including the runs of learning-rate searches.
    """

    caption: str
    contenders: Mapping[str, Contender]
    cells: tuple[StudyCell, ...]
    runs: tuple[TrialOutcome[Trial], ...]

    def text(self) -> str:
        """Return the study as text: the caption, the table and the verdict."""
        return "\n".join([self.caption, "", study_table(self.cells), "", *verdict(self.cells)])

    def as_json(self) -> JsonObject:
        """Return the results as JSON values: the caption, table, verdict, cells and runs.

        A cell has the mean and the spread, which are None if they are not finite.
        """
        cells = [
            {
                "optimizer": cell.optimizer,
                "batch_size": cell.batch_size,
                "tuned": cell.tuned,
                "learning_rate": cell.learning_rate,
                "mean": finite(cell.mean),
                "spread": finite(cell.spread),
                "diverged": cell.diverged,
            }
            for cell in self.cells
        ]
        return {
            "caption": self.caption,
            "metric": metric_of(self.cells),
            "table": study_table(self.cells).splitlines(),
            "verdict": verdict(self.cells),
            "contenders": {name: dict(one.section) for name, one in self.contenders.items()},
            "cells": cells,
            "runs": [outcome.as_json() for outcome in self.runs],
        }


def batch_scaling(
    study: BatchScalingStudy,
    overrides: Sequence[str],
    *,
    json_file: Path | None,
    plot: Path | None,
    console: Console,
) -> Study:
    """Train the config with each optimizer at each batch size, and return the results.

    The results are printed and written. Finished runs are stored next to the output (or in runs/),
    so that the same command does not repeat them.

    Args:
      study: the definition of the study.
      overrides: settings of all runs, which override the study's settings.
      json_file: the file for the results as JSON, or None to write none.
      plot: the directory for the plot, or None for no plot.
      console: the console for the results and the progress.

    Raises:
      JaxdistError: a config, size or name is invalid, or the output cannot be written.
    """
    path, names = study.config, tuple(study.contenders)
    settings = _settings(path, overrides, study.epochs)
    trainer = Trainer(path, settings, study.contenders)
    _, config = load(path, settings)
    seeds_of = range(config.seed, config.seed + TUNING_SEEDS + study.seeds)
    experiments = trainer.check(
        # A check of a single optimizer is enough, since the optimizer does not affect whether a
        # batch divides over devices.
        [Trial(names[0], size, seeds_of[-1], 1.0, 0) for size in study.batches]
    )
    experiment = experiments[0]
    plan = StudyPlan(
        optimizers=study.contenders,
        steps={size: e.total_steps for size, e in zip(study.batches, experiments, strict=True)},
        # The reported runs have other seeds than the search, because the best result of a search is
        # biased by the choice.
        seeds=tuple(seeds_of[TUNING_SEEDS:]),
        tuning_seeds=tuple(seeds_of[:TUNING_SEEDS]),
        tune=study.tune,
    )
    check_writable(plot, json_file)
    journal = OutcomeJournal(journal_path(path, "batch-scaling", json_file, plot), Trial)
    order, cells = [size for size in plan.steps for _ in plan.optimizers], []
    with runs_of(trainer, journal, order, console) as runs:
        for found in run_plan(plan, runs):
            runs.watch.done(_line(found))
            cells += found
    done = Study(_caption(experiment, plan), study.contenders, tuple(cells), runs.outcomes)
    publish(done.text(), done.as_json(), json_file, console)
    if plot is not None:
        model, length = experiment.config.model.type, experiment.config.train.epochs
        title = f"{model} on {path.stem}, {length:g} epochs: mean, lowest and highest of"
        figure = batch_scaling_figure(cells, title=f"{title} {study.seeds} seeds")
        save_figure(figure, plot, "batch_scaling", what="the study")
    return done


def _settings(path: Path, overrides: Sequence[str], epochs: float | None) -> list[str]:
    """Return the overrides of every run.

    Raises:
      ConfigError: an override sets what the study sets, or the number of epochs is unknown.
    """
    for text in overrides:
        key = text.partition("=")[0].strip()
        if any(key == fixed or key.startswith(f"{fixed}.") for fixed in _FIXED):
            raise ConfigError(
                f"override {text!r} has no effect here, because the study sets "
                f"{', '.join(_FIXED)}; leave the override out, and use --optimizers, --batches and "
                "--epochs"
            )
    if epochs is not None:
        return [*overrides, "train.steps=null", f"train.epochs={epochs}"]
    _, config = load(path, overrides)
    if config.train.epochs is None:
        raise ConfigError(
            f"{path} trains {config.train.steps} steps, but a study compares equal numbers of "
            "epochs: add --epochs N"
        )
    return list(overrides)


def _line(cells: Sequence[StudyCell]) -> str:
    """Return a line for the cells of an optimizer at a batch size."""
    found = ", ".join(f"{format_cell(c)} {'tuned' if c.tuned else 'by rule'}" for c in cells)
    return f"{cells[0].optimizer}, batch {cells[0].batch_size}: {found}"


def _caption(experiment: Experiment, plan: StudyPlan) -> str:
    accuracy = "accuracy" in experiment.program.metrics
    metric = "accuracy in percent" if accuracy else "loss in nats"
    return "\n".join(
        [
            trained_on(experiment, f"{experiment.config.train.epochs:g} epochs at each batch size"),
            f"Held-out {metric} after the last step: mean ± sample standard deviation over "
            f"{len(plan.seeds)} seeds.",
            f"By rule: rule {RULE} scales the best learning rate at batch {plan.base} with the "
            f"square root of the batch. The warm-up is {100 * plan.warmup_fraction:.3g}% of the "
            "run times the growth of the batch, and the decay is linear to 0.",
            "Tuned: the best learning rate at each batch size, with the same warm-up and decay.",
            f"The rates of a search differ by a factor of {FACTOR:g} and are compared by the mean "
            f"of {len(plan.tuning_seeds)} other seeds on the same held-out split. By chance, a "
            "tuned mean can therefore be worse than the mean by rule.",
        ]
    )
