"""What a run says when it has ended."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from rich.console import Console

from jaxdist.experiment import Experiment, ExperimentConfig
from jaxdist.metrics.curve import plot_loss
from jaxdist.metrics.writer import read_metrics
from jaxdist.run.directory import RunDirectory
from jaxdist.run.report.results import print_results


def tell_end(
    experiment: Experiment,
    directory: RunDirectory,
    heldout: Mapping[str, float],
    console: Console,
    *,
    step: int,
    seconds: float,
    stopped_by: str | None,
) -> None:
    """Say that a run was stopped after `step`, or is done; of one that is done draw the curve.

    Args:
      heldout: means of the last evaluation.
      seconds: how long it has run.
      stopped_by: what has stopped it before its last step.
    """
    if stopped_by is not None:
        console.print(
            f"{stopped_by}: stopped after step {step} of {experiment.total_steps} "
            f"and saved a checkpoint; {going_on(experiment.config, directory)}",
            soft_wrap=True,
        )
        return
    if jax.process_index() != 0:
        return
    baselines, unit = experiment.baselines(), experiment.loss_unit
    given = read_metrics(directory.path), directory.curve, baselines
    plot_loss(*given, title=directory.path.name, loss_unit=unit)
    console.print(f"done   step {step} in {seconds:.0f} s; curve in {directory.curve}")
    if heldout:
        print_results(heldout, baselines, loss_unit=unit, console=console)


def going_on(config: ExperimentConfig, directory: RunDirectory) -> str:
    """Say how a run that was stopped goes on."""
    if config.checkpoint.parts is not None:
        return "of a part of the state, which another run can begin with (checkpoint.begin_with)"
    identity = directory.identity
    numbered = identity is not None and identity.asked not in (None, directory.path.name)
    # Beside others of its name --resume alone would not know which run is meant.
    which = f" run.directory={directory.path}" if numbered else ""
    return f"continue with the same command and --resume{which}"
