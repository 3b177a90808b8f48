"""Formatting of evaluation results for the console."""

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
      means: held-out means by name, where the loss gives the names.
      baselines: held-out losses of simpler models, in nats, by name.
      loss_unit: unit of "loss", or None if it is unknown.
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
