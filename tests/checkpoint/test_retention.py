"""Which steps go: worked cases, and laws over all lists."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.checkpoint.retention import to_delete

METRICS = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))
SAVED = st.dictionaries(st.integers(0, 10**9), METRICS, max_size=12)


@pytest.mark.parametrize(
    ("keep", "keep_best", "gone"),
    [
        (1, False, (1, 2, 3)),
        (2, False, (1, 2)),
        (9, True, ()),
        (1, True, (1, 3)),
    ],
)
def test_worked_cases(keep: int, keep_best: bool, gone: tuple[int, ...]) -> None:
    saved = {4: None, 1: 9.0, 2: 1.0, 3: math.nan}
    assert to_delete(saved, keep=keep, keep_best=keep_best) == gone


def test_of_equal_metrics_the_newest_is_best() -> None:
    assert to_delete({1: 0.5, 2: 0.5, 3: 0.7}, keep=1, keep_best=True) == (1,)


@given(SAVED, st.integers(1, 5), st.booleans())
def test_laws(saved: dict[int, float | None], keep: int, keep_best: bool) -> None:
    gone = to_delete(saved, keep=keep, keep_best=keep_best)
    steps = sorted(saved)
    kept = [step for step in steps if step not in gone]
    assert list(gone) == sorted(set(gone))
    assert set(gone) <= set(steps)
    assert kept[-keep:] == steps[-keep:]
    assert len(kept) <= keep + keep_best
    finite = {n: m for n, m in saved.items() if m is not None and math.isfinite(m)}
    if keep_best and finite:
        assert min(finite.values()) in [m for step, m in finite.items() if step in kept]
    remaining = {step: saved[step] for step in kept}
    assert to_delete(remaining, keep=keep, keep_best=keep_best) == ()
