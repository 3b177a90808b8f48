"""Runs whose tables are on servers, as processes: to their end, resumed elsewhere, and killed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from runs import Jaxdist

CLICKS = {
    "model": {"type": "dlrm", "width": 4, "bottom": [4], "top": [4]},
    "data": {"type": "clicks", "fields": 3, "ids": 50, "examples": 256, "heldout_examples": 32},
    "optim": {
        "type": "sgd",
        "momentum": 0.0,
        "learning_rate": 0.5,
        "schedule": {"type": "constant"},
    },
    "train": {"steps": 6, "batch_size": 16, "log_every": 1},
    "checkpoint": {"every": 3},
}


def _strategy(servers: int) -> str:
    return f"strategy={{type: hybrid, servers: {servers}, optimizer: {{type: sgd}}}}"


def _records(run: Path, split: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == split]


@pytest.mark.full
def test_a_run_equals_one_mesh_and_goes_on_with_other_servers(jaxdist: Jaxdist) -> None:
    jaxdist.config(CLICKS)
    assert jaxdist.train("run.directory=alone").code == 0
    found = jaxdist.train("--devices", 2, "run.directory=run", _strategy(2))
    assert found.code == 0, found.err
    alone, run = jaxdist.folder / "alone", jaxdist.folder / "run"
    for one, other in zip(_records(alone, "train"), _records(run, "train"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    (heldout,) = _records(run, "heldout")
    (first, counted) = _records(run, "servers")
    assert first["ids"] * 2 == counted["ids"] == 6 * 16 * 3
    assert counted["unique_ratio"] == counted["unique_ids"] / counted["ids"] < 1
    formula = counted["unique_ids"] * (8 + 2 * 4 * 4)
    assert formula <= counted["bytes"] <= formula + 6 * 2 * 4
    told = jaxdist("eval", "run", "--json", "eval.json")
    assert told.code == 0, told.err
    means = json.loads((jaxdist.folder / "eval.json").read_text())["heldout"]
    assert means["auc"] == pytest.approx(heldout["auc"], rel=1e-5)
    newest = max((run / "checkpoints").glob("step_*"))
    for file in sorted(newest.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    newest.rmdir()
    again = jaxdist.train("--resume", "run.directory=run", _strategy(3))
    assert again.code == 0, again.err
    assert "resume from step 3" in again.out
    assert _records(run, "heldout")[-1]["loss"] == pytest.approx(heldout["loss"], rel=1e-5)


@pytest.mark.full
def test_a_server_that_dies_ends_the_run_which_its_checkpoint_continues(jaxdist: Jaxdist) -> None:
    jaxdist.config(CLICKS, train={"steps": 100_000, "log_every": 1000})
    process = jaxdist.start("train", "config.yaml", "run.directory=run", _strategy(2))
    tables = jaxdist.folder / "run" / "checkpoints"
    deadline = time.monotonic() + 120
    while not list(tables.glob("step_*")):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    os.kill(_table_server(jaxdist.folder / "run"), signal.SIGKILL)
    _, err = process.communicate()
    assert "table 1 ended (signal SIGKILL)" in err
    assert "--resume" in err
    step = max(int(path.name.removeprefix("step_")) for path in tables.glob("step_*"))
    again = jaxdist.train("--resume", "run.directory=run", _strategy(1), f"train.steps={step + 1}")
    assert again.code == 0, again.err


def _table_server(run: Path) -> int:
    """Return the process that has the log of the run's table server 1 as its standard error."""
    log = (run / "logs" / "table_1.log").resolve()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if (folder / "fd" / "2").resolve() == log:
                    return int(folder.name)
            except OSError:
                continue
    raise AssertionError("no such process")
