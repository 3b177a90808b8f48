"""`jaxdist bench plan --maxtext`: the first plan of each model beside MaxText's program."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.planner import maxtext
from jaxdist.errors import RunError
from jaxdist.planner.confirm import Confirmed
from jaxdist.planner.plan import Plan


def test_a_dump_that_is_missing_is_told_with_the_command_that_makes_it(tmp_path: Path) -> None:
    (tmp_path / "7b").mkdir()
    with pytest.raises(RunError, match=r"70b is no directory: write it with .*scripts/maxtext 70b"):
        maxtext.figures(tmp_path)


@pytest.mark.slow
def test_the_first_plan_stands_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def compiled(settings: list[str], plan: Plan, topology: str) -> Confirmed:
        asked.append((plan.devices, topology, "model.layers=32" in settings))
        return Confirmed(seconds=2.0, peak_bytes=10**9)

    for name in maxtext.CASES:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(maxtext, "kept_or_compiled", compiled)
    monkeypatch.setattr(maxtext, "predicted", lambda *given: SimpleNamespace(seconds=4.0))
    found = maxtext.figures(tmp_path)
    assert [(one.ours, one.reference) for one in found] == [(2.0, 4.0)] * 2
    assert asked == [(64, "v5p:4x4x4", True), (64, "v5p:4x4x4", False)]
    monkeypatch.setattr(maxtext, "kept_or_compiled", lambda *given: Confirmed(refusal="too large"))
    with pytest.raises(RunError, match="refuses the first plan: too large"):
        maxtext.figures(tmp_path)
