"""Results of study runs that tests create without training."""

from __future__ import annotations

from jaxdist.study.plan import StudyCell
from jaxdist.study.trial import Trial, TrialOutcome


def outcome(trial: Trial, accuracy: float, *, diverged: bool = False) -> TrialOutcome:
    loss = float("nan") if diverged else 1 - accuracy
    return TrialOutcome(trial, 10, {"accuracy": accuracy, "loss": loss}, diverged, 1.0)


def cell(
    name: str, batch_size: int, *accuracies: float | None, tuned: bool = False, rate: float = 0.1
) -> StudyCell:
    """Return a cell with one run for each accuracy; None stands for a run that diverged."""
    outcomes = tuple(
        outcome(Trial(name, batch_size, seed, rate, 0), value or 0.1, diverged=value is None)
        for seed, value in enumerate(accuracies)
    )
    return StudyCell(name, batch_size, tuned, outcomes)
