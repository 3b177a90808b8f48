"""The bench of lost processes: how its logs are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxdist.bench.elastic import cost, report, sigterm
from jaxdist.errors import RunError


def test_a_race_that_the_other_cannot_run_has_no_number(monkeypatch: pytest.MonkeyPatch):
    def fails(python: str, kills: int) -> list[report.Recovery]:
        raise RunError("nothing has happened\nfor long")

    monkeypatch.setattr(report, "torch_recoveries", fails)
    (figure,) = report.beside_torchrun([report.Recovery(5.0, 7, {})], "python", 1)
    assert figure.holds is False
    assert figure.note == "torchrun did not go on: nothing has happened"


def test_both_are_read_from_their_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    theirs = [report.Recovery(10.0, 40, {}), report.Recovery(20.0, 60, {})]
    monkeypatch.setattr(report, "torch_recoveries", lambda python, kills: theirs)
    time, lost = report.beside_torchrun([report.Recovery(6.0, 5, {})], "python", 2)
    assert (time.ratio, lost.ratio) == (0.4, 0.1)
    (tmp_path / "steps").write_text("1.0 1\n2.0 2\n9.0 2\n")
    assert report._lines(tmp_path) == [(1.0, 1.0), (2.0, 2.0), (9.0, 2.0)]
    assert report._went_back(report._lines(tmp_path)[1:])
    assert not report._went_back(report._lines(tmp_path)[:2])
    journal = tmp_path / "elastic.jsonl"
    journal.write_text(json.dumps({"generation": 2, "event": "lost", "step": 9}) + "\n")
    assert report._event(journal, 2, "lost") == {"generation": 2, "event": "lost", "step": 9}
    assert report._event(journal, 1, "lost") is None


def test_steps_with_and_without_snapshots_and_what_is_held(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cost, "CONFIG", "mlp/digits")
    monkeypatch.setattr(cost, "BEATS_SECONDS", 0.01)
    monkeypatch.setattr(cost, "CALLS", 100)
    step, cpu, held, told = cost.figures(pairs=2)
    assert step.name == "step with a snapshot each 10"
    assert min(step.ours, cpu.ours, cpu.reference) > 0
    assert held.reference < held.ours < 1.5 * held.reference  # the heads are small, the state too
    assert told.reference == step.reference


@pytest.mark.full
def test_sigterm_saves_and_ends_with_its_code():
    """A trial raises where the last step was not saved, or where the exit code is another."""
    figure = sigterm.figure(3)
    assert figure.ours > 0
    assert figure.goal == "<= 1"
