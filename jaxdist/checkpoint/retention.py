"""The choice of the checkpoints to delete after a save: all except the newest and the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Saved(NamedTuple):
    """A committed checkpoint: its step, and its metric, or None if it was saved without a metric.

    A metric that is None or not finite is never the best.
    """

    step: int
    metric: float | None


def best_step(saved: Sequence[Saved], *, lower_is_better: bool) -> int | None:
    """Return the step with the best metric, or None if no metric is finite.

    If several metrics are equal, the newest step is returned.
    """
    sign = -1.0 if lower_is_better else 1.0
    ranked = [
        (sign * s.metric, s.step) for s in saved if s.metric is not None and math.isfinite(s.metric)
    ]
    return max(ranked)[1] if ranked else None


def to_delete(
    saved: Sequence[Saved], *, keep: int, keep_best: bool, lower_is_better: bool
) -> tuple[int, ...]:
    """Return the steps to delete, beginning with the oldest step.

    The newest `keep` steps are not deleted. The best step is not deleted if `keep_best` is set.

    >>> saved = [Saved(1, 0.5), Saved(2, 0.1), Saved(3, float("nan")), Saved(4, 0.3)]
    >>> to_delete(saved, keep=1, keep_best=True, lower_is_better=True)
    (1, 3)
    """
    assert keep >= 1, keep
    steps = sorted(s.step for s in saved)
    kept = {
        *steps[-keep:],
        best_step(saved, lower_is_better=lower_is_better) if keep_best else None,
    }
    return tuple(step for step in steps if step not in kept)
