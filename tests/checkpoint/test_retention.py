"""Which steps go: worked cases, and laws over all lists."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.checkpoint.retention import Saved, best_step, to_delete

METRICS = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))
SAVED = st.dictionaries(st.integers(0, 10**9), METRICS, max_size=12).map(
    lambda d: [Saved(step, metric) for step, metric in d.items()]
)


@pytest.mark.parametrize(
    ("keep", "keep_best", "lower_is_better", "gone"),
    [
        (1, False, True, (1, 2, 3)),
        (2, False, True, (1, 2)),
        (9, True, True, ()),
        (1, True, True, (1, 3)),
        (1, True, False, (2, 3)),
    ],
)
def test_worked_cases(
    keep: int, keep_best: bool, lower_is_better: bool, gone: tuple[int, ...]
) -> None:
    saved = [Saved(4, None), Saved(1, 9.0), Saved(2, 1.0), Saved(3, math.nan)]
    assert to_delete(saved, keep=keep, keep_best=keep_best, lower_is_better=lower_is_better) == gone


def test_of_equal_metrics_the_newest_is_best() -> None:
    saved = [Saved(1, 0.5), Saved(2, 0.5), Saved(3, 0.7)]
    assert best_step(saved, lower_is_better=True) == 2


@given(SAVED, st.integers(1, 5), st.booleans(), st.booleans())
def test_laws(saved: list[Saved], keep: int, keep_best: bool, lower: bool) -> None:
    gone = to_delete(saved, keep=keep, keep_best=keep_best, lower_is_better=lower)
    steps = sorted(s.step for s in saved)
    kept = [step for step in steps if step not in gone]
    assert list(gone) == sorted(set(gone))
    assert set(gone) <= set(steps)
    assert kept[-keep:] == steps[-keep:]
    assert len(kept) <= keep + keep_best
    finite = [s for s in saved if s.metric is not None and math.isfinite(s.metric)]
    if keep_best and finite:
        extreme = (min if lower else max)(s.metric for s in finite)
        assert extreme in [s.metric for s in finite if s.step in kept]
    remaining = [s for s in saved if s.step in kept]
    assert to_delete(remaining, keep=keep, keep_best=keep_best, lower_is_better=lower) == ()
