"""`jaxdist bench plan` compares published plans with the first plans of the search."""

from __future__ import annotations

import math

import pytest

from benchmarks.planner import report


@pytest.mark.full
def test_a_run_is_compared_even_if_no_plan_fits_its_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published run of 70B on 32 chips of v6e offloads activations; without that none fits."""
    rows = [
        row
        for row in report.PUBLISHED
        if (row.name, row.topology) in {("Llama-3.1-70B", "v6e:4x8"), ("16B", "v5e:16x16")}
    ]
    monkeypatch.setattr(report, "PUBLISHED", rows)
    found, lacking = report.against_rows()
    assert (found.why(), lacking.why()) == ("ours too, number 1 of five", "no plan fits")
    assert math.isinf(lacking.ratio)
    figure = report.against_figure([found, lacking])
    assert (figure.ours, figure.reference) == (1, 2)
    assert "no plan fits 1 of the runs" in figure.note
    assert [row[3] for row in report.against_listing([found, lacking]).rows] == [
        "data 256, ZeRO 3, full",
        "-",
    ]
