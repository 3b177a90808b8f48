"""Trackers that a config names: each real package where it is installed, and one that fails."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from runs import DIGITS, Jaxdist, metrics

import jaxdist as jd
from jaxdist.errors import ConfigError
from jaxdist.metrics.trackers import config as trackers
from jaxdist.metrics.trackers.contract import Tracked
from jaxdist.run.hooks.track import GIVEN_UP, KEPT

SHORT = {
    **DIGITS,
    "train": {"steps": 4, "batch_size": 64, "log_every": 2},
    "eval": {"every": 4, "batches": 2},
    "checkpoint": {"every": 2},
}
CALLS: list[Any] = []
BLOCK = 32_768


class Mine:
    """A tracker of the user's own, which may fail."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        CALLS.clear()

    def start(self, run: Tracked) -> str:
        CALLS.append(("start", run))
        self._fail("start")
        return "kept-" + run.id

    def record(self, step: int, split: str, values: Mapping[str, float]) -> None:
        CALLS.append(("record", step, split, dict(values)))
        self._fail("record")

    def end(self, summary: Mapping[str, float], status: str) -> None:
        CALLS.append(("end", dict(summary), status))
        self._fail("end")

    def _fail(self, what: str) -> None:
        if what == self.fails:
            raise ConnectionError("no route to host")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def tracked(*found: Any) -> Any:
    return {**SHORT, "metrics": {"trackers": [*found]}}


def mine(fails: str = "") -> Any:
    return {"type": "import", "path": f"{__name__}:Mine", "args": {"fails": fails}}


def numbers(run: Path, split: str) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in metrics(run) if r["split"] == split}


def test_a_tracker_of_ones_own_gets_all_that_is_written_down():
    found = jd.fit(tracked(mine()), quiet=True)
    (_, run), *records, (_, summary, status) = CALLS
    assert (run.name, run.directory, run.kept) == ("fit", found.directory, None)
    assert run.id == json.loads((found.directory / "run.json").read_text())["id"]
    assert run.config["train"]["steps"] == 4
    assert run.versions["jaxdist"]
    seen = {(step, split): values.get("loss") for _, step, split, values in records}
    for split in ("train", "heldout"):
        ours = {step: loss for (step, at), loss in seen.items() if at == split}
        assert ours == numbers(found.directory, split)
    assert (0, "goodput") in seen
    assert (summary["train/loss"], summary["step"]) == (found.metrics["loss"], 4)
    assert summary["heldout/loss"] == found.heldout["loss"]
    assert 0 < summary["goodput/goodput"] < 1
    assert summary["goodput/step_seconds"] > 0
    assert status == "finished"


def test_a_run_that_goes_on_is_the_same_tracked_run():
    half = jd.fit(tracked(mine()), ["train.steps=2"], quiet=True)
    kept = json.loads((half.directory / KEPT).read_text())
    assert [*kept] == [f"import:{__name__}:Mine"]
    jd.fit(tracked(mine()), resume=True, quiet=True)
    (_, run), *_ = CALLS
    assert run.kept == kept[f"import:{__name__}:Mine"] == f"kept-{run.id}"
    assert min(step for what, step, *_ in CALLS if what == "record") == 2


@pytest.mark.parametrize("fails", ["start", "record", "end"])
@pytest.mark.every(3)
def test_a_tracker_that_fails_is_told_once_and_ends_nothing(
    fails: str, capsys: pytest.CaptureFixture[str]
):
    found = jd.fit(tracked(mine(fails)))
    assert (found.step, found.exit_code) == (4, 0)
    out = capsys.readouterr().out
    assert out.count("warning: tracker") == 1
    assert "ConnectionError: no route to host" in out
    records = [one for one in CALLS if one[0] == "record"]
    assert len(records) == {"start": 0, "record": GIVEN_UP}.get(fails, len(records))
    assert bool([one for one in CALLS if one[0] == "end"]) == (fails != "start")


def test_a_run_that_fails_is_tracked_as_failed():
    class Broken(jd.Hook):
        def step(self, run: Any, step: int, metrics: Any) -> None:
            raise ValueError("no")

    with pytest.raises(jd.JaxdistError):
        jd.fit(tracked(mine()), hooks=[Broken()], quiet=True)
    assert CALLS[-1][2] == "failed"


def test_a_package_that_is_missing_is_told_before_anything_begins(
    jaxdist: Jaxdist, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    monkeypatch.setattr("jax.devices", lambda *_: pytest.fail("devices were touched"))
    for name in ("wandb", "trackio", "mlflow"):
        jaxdist.config(tracked({"type": name}))
        done = jaxdist.here("train", "config.yaml")
        assert done.code == 2
        assert f"metrics.trackers.0.type = '{name}'" in done.message
        assert f"pip install 'jaxdist[{name}]'" in done.message
    assert not jaxdist.run.exists()


def test_what_is_no_tracker_is_refused():
    for path, words in {
        "builtins:dict": "returned a dict without start, record, end",
        f"{__name__}:Nothing": "has no attribute 'Nothing'",
    }.items():
        with pytest.raises(ConfigError, match=rf"metrics\.trackers\.0[\s\S]*{words}"):
            jd.fit(tracked({"type": "import", "path": path}), quiet=True)
    with pytest.raises(ConfigError, match=r"metrics\.trackers\.0\.projct"):
        jd.fit(tracked({"type": "wandb", "projct": "a"}), quiet=True)


def values_of(items: Any) -> dict[str, Any]:
    """The values of items of a record of wandb's by name."""
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def logged(file: Path) -> Iterator[bytes]:
    """The records in a file that `wandb sync` would send: a log as LevelDB has it."""
    data, at, parts = file.read_bytes(), 7, []
    while at < len(data):
        if BLOCK - at % BLOCK < 7:  # no header begins so late in a block
            at += BLOCK - at % BLOCK
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts.append(data[at + 7 : at + 7 + size])
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_offline(tmp_path: Path):
    wandb = pytest.importorskip("wandb")

    given = tracked({"type": "wandb", "project": "p", "mode": "offline", "tags": ["a"]})
    half = jd.fit(given, ["train.steps=2"], quiet=True)
    assert wandb.run is None
    found = jd.fit(given, resume=True, quiet=True)
    kept = json.loads((half.directory / KEPT).read_text())["wandb:p"]
    folders = sorted((found.directory / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all(folder.name.endswith(kept) for folder in folders)
    rows, config, summary = {}, {}, {}
    for folder in folders:
        (file,) = folder.glob("*.wandb")
        for data in logged(file):
            record = wandb.proto.wandb_internal_pb2.Record.FromString(data)
            config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
            summary |= values_of(record.summary.update)
            if row := values_of(record.history.item):
                rows[row["step"]] = {**rows.get(row["step"], {}), **row}
    ours = numbers(found.directory, "train")
    assert {s: row["train/loss"] for s, row in rows.items() if "train/loss" in row} == ours
    assert config["train"]["steps"] in (2, 4)
    assert config["jaxdist"]["id"] == kept
    assert summary["train/loss"] == found.metrics["loss"]
    assert summary["status"] == "finished"


@pytest.mark.filterwarnings("ignore")
def test_trackio_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    given = tracked({"type": "trackio", "project": "p"})
    jd.fit(given, ["train.steps=2"], quiet=True)
    found = jd.fit(given, resume=True, quiet=True)
    name = json.loads((found.directory / KEPT).read_text())["trackio:p"]
    (file,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as base:
        rows = base.execute("select run_name, step, metrics from metrics").fetchall()
    assert {row[0] for row in rows} == {name}
    told: dict[str, dict[int, Any]] = {}
    for _, step, values in rows:
        for key, value in json.loads(values).items():
            told.setdefault(key, {})[step] = value
    assert told["train/loss"] == numbers(found.directory, "train")
    assert told["heldout/loss"] == numbers(found.directory, "heldout")
    assert told["final/train/loss"][4] == found.metrics["loss"]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_in_a_database(tmp_path: Path):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    given = tracked({"type": "mlflow", "project": "p", "name": "n", "uri": uri})
    jd.fit(given, ["train.steps=2"], quiet=True)
    found = jd.fit(given, resume=True, quiet=True)
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient(uri)
    project = client.get_experiment_by_name("p")
    assert project is not None
    (run,) = client.search_runs([project.experiment_id])
    assert run.info.run_id == json.loads((found.directory / KEPT).read_text())["mlflow:p"]
    assert (run.info.run_name, run.info.status) == ("n", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert {one.step: one.value for one in history} == numbers(found.directory, "train")
    assert run.data.params["model.type"] == "mlp"
    assert (
        run.data.tags["jaxdist.id"] == json.loads((found.directory / "run.json").read_text())["id"]
    )
    assert run.data.metrics["final/train/loss"] == found.metrics["loss"]
    assert 0 < run.data.metrics["final/goodput/goodput"] < 1
