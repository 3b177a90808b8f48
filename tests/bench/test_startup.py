from __future__ import annotations

import sys

import pytest

from benchmarks import startup


@pytest.mark.slow  # a measurement; no test reads its figures
def test_a_backend_start_is_told_from_none():
    assert startup.starts_backend(startup.START_BACKEND)
    assert not startup.starts_backend(startup.IMPORT_JAX)


@pytest.mark.slow
def test_the_report_holds_the_three_figures(monkeypatch):
    quick = (sys.executable, "-S", "-c", "pass")
    for name in ("IMPORT_JAX", "IMPORT_JAXDIST", "HELP"):
        monkeypatch.setattr(startup, name, quick)
    report = startup.bench(repeats=1)
    assert report.bench == "startup"
    assert [(f.name, f.goal) for f in report.figures] == [
        ("import jaxdist", "<= 1.5"),
        ("jaxdist --help", "<= 1.5"),
        ("--help starts a backend", "<= 0"),
    ]
    helps = report.figures[2]
    assert (helps.ours, helps.reference, helps.holds) == (0, 1, True)
    monkeypatch.setattr(startup, "HELP", startup.START_BACKEND)
    assert startup.starts_backend(startup.HELP)
