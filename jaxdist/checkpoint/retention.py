"""The choice of the checkpoints to delete after a save: all except the newest and the best."""

from __future__ import annotations

import math
from collections.abc import Mapping


def to_delete(
    metrics: Mapping[int, float | None], *, keep: int, keep_best: bool
) -> tuple[int, ...]:
    """Return the steps to delete, beginning with the oldest step.

    The newest `keep` steps are not deleted. With `keep_best`, neither is the step with the lowest
    finite metric, or the newest of several such steps.

    Args:
      metrics: the metric of each committed checkpoint by step, or None for a checkpoint without a
        metric.

    >>> to_delete({1: 0.5, 2: 0.1, 3: float("nan"), 4: 0.3}, keep=1, keep_best=True)
    (1, 3)
    """
    assert keep >= 1, keep
    steps = sorted(metrics)
    finite = [(m, -step) for step, m in metrics.items() if m is not None and math.isfinite(m)]
    best = {-min(finite)[1]} if keep_best and finite else set[int]()
    kept = {*steps[-keep:], *best}
    return tuple(step for step in steps if step not in kept)
