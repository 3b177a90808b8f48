"""The bench of lost processes: how its logs are read."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.elastic import cost, peer, report, sigterm
from benchmarks.elastic.scoreboard import strikes
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
    assert strikes.event(tmp_path, 2, "lost") == {"generation": 2, "event": "lost", "step": 9}
    assert strikes.event(tmp_path, 1, "lost") is None


TORCHRUN = """#!{python}
import os, subprocess, sys, time
from pathlib import Path
assert sys.argv[1:3] == ["-m", "torch.distributed.run"]
folder = Path(sys.argv[-2])
step, beginnings = 0, 0
while True:
    beginnings += 1
    shared = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
    if beginnings > 1 and shared:
        sys.exit("Gloo connectFullMesh failed")
    ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(4)]
    for rank, process in enumerate(ranks):
        (folder / f"pid_{{rank}}").write_text(str(process.pid))
    while all(one.poll() is None for one in ranks):
        step += 1
        with (folder / "steps").open("a") as log:
            log.write(f"{{time.time()}} {{step}}\\n")
        time.sleep(0.001)
    [one.kill() for one in ranks]
    step = step // 100 * 100
"""


def test_torchrun_goes_on_from_its_last_checkpoint(tmp_path: Path):
    """It fails where restarts share a store, as torch 2.13 does by default."""
    python = tmp_path / "python"
    python.write_text(TORCHRUN.format(python=sys.executable))
    python.chmod(0o755)
    found = report.torch_recoveries(str(python), 2)
    assert all(0 < one.seconds < 60 for one in found)
    assert all(0 < one.lost_steps <= peer.EVERY for one in found)


@pytest.mark.slow
def test_steps_with_and_without_snapshots_and_what_is_held(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cost, "CONFIG", "mlp/digits")
    monkeypatch.setattr(cost, "BEATS_SECONDS", 0.01)
    monkeypatch.setattr(cost, "CALLS", 100)
    step, cpu, held, told = cost.figures(pairs=2)
    assert step.name == "step with a snapshot each 10"
    assert min(step.ours, cpu.ours, cpu.reference) > 0
    assert held.reference < held.ours < 1.5 * held.reference  # the heads are small, the state too
    assert told.reference == step.reference


@pytest.mark.slow  # that a signal saves: tests/run/test_elastic.py
def test_sigterm_saves_and_ends_with_its_code():
    """A trial raises where the last step was not saved, or where the exit code is another."""
    figure = sigterm.figure(2)
    assert figure.ours > 0
    assert figure.goal == "<= 1"


def test_the_share_of_an_agent_is_of_several_windows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report, "AGENT_SECONDS", 0.02)
    figure = report.agent_figure(os.getpid())
    assert figure.ratio < 2
    assert "the median of 6 times 0.02 s; from " in figure.note
