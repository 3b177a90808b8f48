"""The printed form of evaluation results."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console


def print_results(
    means: Mapping[str, float],
    baselines: Mapping[str, float],
    *,
    loss_unit: str | None,
    console: Console,
) -> None:
    """Print held-out means, and the losses of simpler models on the same data.

    Args:
      means: the held-out means by name, with the names that the loss function gives.
      baselines: the held-out losses of simpler models, by name, in nats.
      loss_unit: the unit of the mean "loss", or None if the unit is unknown.
    """
    for name, value in sorted(means.items(), key=lambda item: item[0] != "loss"):
        counted = f" {loss_unit}" if name == "loss" and loss_unit is not None else ""
        console.print(f"held-out {name} {value:.4f}{counted}", soft_wrap=True)
    for name, value in baselines.items():
        verdict = "beaten" if means["loss"] < value else "not beaten"
        console.print(
            f"         {name} {value:.4f}, counted on the same training data: {verdict}",
            soft_wrap=True,
        )
