"""The lines that a run prints at its end."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from rich.console import Console

from jaxdist.experiment import Experiment, ExperimentConfig
from jaxdist.metrics.curve import plot_loss
from jaxdist.metrics.writer import read_metrics
from jaxdist.run.directory import RunDirectory
from jaxdist.run.hooks.contract import Outcome
from jaxdist.run.report.results import print_results


def tell_end(
    experiment: Experiment,
    directory: RunDirectory,
    ending: Outcome,
    seconds: float,
    heldout: Mapping[str, float],
    console: Console,
) -> None:
    """Print how a run ended; draw the curve of a run that will not continue.

    Args:
      seconds: the duration of the run, in seconds.
      heldout: the means of the last evaluation.
    """
    step, stopped_by = ending.step, ending.stopped_by
    if not ending.complete:
        console.print(
            f"{stopped_by}: stopped after step {step} of {experiment.total_steps} "
            f"and saved a checkpoint; {going_on(experiment.config, directory)}",
            soft_wrap=True,
        )
        return
    if jax.process_index() != 0:
        return
    if stopped_by is not None:
        console.print(
            f"{stopped_by}: this hook ended the run after step {step} of {experiment.total_steps}",
            soft_wrap=True,
        )
    baselines, unit = experiment.baselines(), experiment.loss_unit
    given = read_metrics(directory.path), directory.curve, baselines
    plot_loss(*given, title=directory.path.name, loss_unit=unit)
    console.print(f"done   step {step} in {seconds:.0f} s; curve in {directory.curve}")
    if heldout:
        print_results(heldout, baselines, loss_unit=unit, console=console)


def going_on(config: ExperimentConfig, directory: RunDirectory) -> str:
    """Return the instruction with which the user continues a run that was stopped."""
    if config.checkpoint.parts is not None:
        return "of a part of the state, with which another run can begin (checkpoint.begin_with)"
    identity = directory.identity
    numbered = identity is not None and identity.asked not in (None, directory.path.name)
    # If several runs have this name, the option --resume would not identify this run.
    which = f" run.directory={directory.path}" if numbered else ""
    return f"continue with the same command and --resume{which}"
