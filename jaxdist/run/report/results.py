"""How results are shown to a person."""

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
    """Held-out means, and beside the loss what simpler models get on the same data.

    Args:
      means: name to mean, as the loss names them.
      baselines: name of a simpler model to its held-out loss, in nats.
      loss_unit: what "loss" is counted in; None where that is not known.
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
