"""The bench of the jobs: its parts, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.jobs import report
from benchmarks.jobs.report import CNN, PROGRAMS, TRAINED, accuracy, bench
from jaxdist.errors import JaxdistError, RunError
from jaxdist.experiment import load


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(JaxdistError, match="no part 'packin': did you mean 'packing'"):
        bench(part=["packin"])


def test_the_configs_of_the_parts_exist_and_have_targets() -> None:
    for path, overrides in PROGRAMS.values():
        load(path, overrides)
    for path in TRAINED:
        assert re.search(r"# target: +held-out accuracy 0\.\d+", path.read_text()), path
    _, config = load(CNN)
    assert (config.train.steps, config.train.batch_size) == (report.STEPS, report.BATCH)


def test_the_last_held_out_accuracy_counts(tmp_path: Path) -> None:
    rows = [{"step": n, "split": "heldout", "accuracy": n / 10} for n in (1, 5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert accuracy(tmp_path) == 0.5
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": 1.0}')
    with pytest.raises(RunError, match="has no held-out accuracy"):
        accuracy(tmp_path)


@pytest.mark.slow
def test_a_process_that_fails_or_hangs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "CNN", tmp_path / "none.yaml")
    with pytest.raises(RunError, match=r"a process of .*none\.yaml failed: .*none\.yaml"):
        report.two_processes(0)
    monkeypatch.setattr(report, "TIMEOUT_SECONDS", 0.01)
    with pytest.raises(RunError, match=r"took more than 0\.01 s"):
        report.two_processes(0)
