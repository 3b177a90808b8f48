"""The bench of the jobs: its parts, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.jobs import report
from benchmarks.jobs.experts_floor import by_file, floors
from benchmarks.jobs.report import CNN, PROGRAMS, bench
from benchmarks.jobs.steps import MODELS, commands, steps
from benchmarks.jobs.targets import TRAINED, Target, reached, target_of, targets
from jaxdist.errors import JaxdistError, RunError
from jaxdist.experiment import load


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(JaxdistError, match="no part 'packings': did you mean 'packing'"):
        bench(part=["packings"])
    with pytest.raises(JaxdistError, match="no config 'mlp/digit': did you mean 'mlp/digits'"):
        bench(part=["targets:mlp/digit"])
    with pytest.raises(JaxdistError, match="only part targets has single configs, not packing"):
        bench(part=["packing:mlp/digits"])


def test_the_configs_of_the_parts_exist_and_have_targets() -> None:
    for path, overrides in PROGRAMS.values():
        load(path, overrides)
    assert {target_of(path).metric for path in TRAINED} == {"accuracy", "loss", "rmse", "auc"}
    _, config = load(CNN)
    assert (config.train.steps, config.train.batch_size) == (report.STEPS, report.BATCH)


def test_the_last_held_out_value_counts(tmp_path: Path) -> None:
    rows = [{"step": n, "split": "heldout", "accuracy": n / 10} for n in (1, 5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert reached(tmp_path, "accuracy") == 0.5
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": 1.0}')
    with pytest.raises(RunError, match="has no held-out accuracy"):
        reached(tmp_path, "accuracy")


def test_a_head_says_how_a_run_reaches_which_target(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    head = f"# command: jaxdist train {path} --devices 8 'mesh={{data: 4}}'\n# target: held-out "
    path.write_text(f"{head}AUC of clicks 0.75 after 3 steps")
    assert target_of(path) == Target(["--devices", "8", "mesh={data: 4}"], "auc", 0.75)
    assert [Target((), metric, 1.0).goal for metric in ("auc", "rmse")] == [">= 1", "<= 1"]
    path.write_text(f"{head}accuracy as high as you can")
    with pytest.raises(RunError, match=r"mine.yaml needs a line .* '# target: held-out METRIC"):
        target_of(path)


def test_a_command_that_fails_reaches_no_target(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"# command: jaxdist train {path}\n# target: held-out loss 1.0\nmodle: 1")
    found, _, total, cpu = targets(None, [path])
    assert (found.holds, total.holds, cpu.holds) == (False, False, None)
    assert "failed: exit code 2" in found.note


def test_the_configs_of_a_race_with_torch_exist() -> None:
    for name, raced in MODELS.items():
        load(raced.path, raced.overrides)
        contenders = dict(commands(name, "python"))
        assert [*contenders] == ["jaxdist", "eager", "compiled"]
        ((command, _),) = contenders["eager"]
        assert command[2:] == [name, "eager", str(raced.batch)]


def test_a_race_without_torch_is_skipped(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no torch here >&2; exit 1")
    python.chmod(0o755)
    found = list(steps(str(python), ["BERT-small", "ViT-small"]))
    assert [figure.note for figure in found] == ["skipped: no torch here"] * 2


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


def test_the_floor_of_equal_parts_is_zero_and_falls_with_their_number() -> None:
    uneven = np.array([[[3.0, 1.0]], [[1.0, 3.0]]])
    assert floors(np.full((4, 2, 3), 5.0)).max() == 0
    few, many = (floors(np.tile(uneven, (times, 1, 1)), 400).mean() for times in (2, 32))
    assert 3 < few / many < 6  # With 16 times the parts, a quarter.


def test_batches_are_added_up_for_each_file() -> None:
    """All batches after the last file count for the last file."""
    batches = np.ones((3, 1, 2))
    assert by_file(batches, 1e-9, 1 << 30).tolist() == [[[3.0, 3.0]]]
