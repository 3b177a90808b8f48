"""What programs need that start commands: JSON with a version, and silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import DIGITS, Jaxdist, metrics

from jaxdist.errors import STOPPED

SHORT = {**DIGITS, "train": {"steps": 4, "batch_size": 64, "log_every": 2}}
STOPS = """
import os, signal
import jaxdist

class Stops(jaxdist.Hook):
    def step(self, run, step, metrics):
        os.kill(os.getpid(), signal.SIGTERM)
"""


def read(path: Path) -> Any:
    found = json.loads(path.read_text())
    assert found["schema"] == 1
    return found


@pytest.mark.full
def test_a_run_its_evaluation_and_its_config_as_json(jaxdist: Jaxdist):
    jaxdist.config(SHORT)
    assert jaxdist.here("train", "config.yaml", "--json", "a.json").code == 0
    found = read(jaxdist.folder / "a.json")
    last = metrics(jaxdist.run)
    assert (found["step"], found["total_steps"], found["exit_code"]) == (4, 4, 0)
    assert found["stopped_by"] is None
    assert found["run"] == "runs/config"
    assert found["id"] == json.loads((jaxdist.run / "run.json").read_text())["id"]
    for key, split in (("metrics", "train"), ("heldout", "heldout")):
        assert found[key]["loss"] == [r["loss"] for r in last if r["split"] == split][-1]
    assert 0 < found["goodput"] < 1
    assert jaxdist.here("eval", "runs/config", "--json", "b.json").code == 0
    evaluated = read(jaxdist.folder / "b.json")
    assert (evaluated["run"], evaluated["step"]) == ("runs/config", 4)
    assert evaluated["heldout"]["loss"] > 0
    assert jaxdist.here("config", "show", "config.yaml", "seed=3", "--json", "c.json").code == 0
    shown = read(jaxdist.folder / "c.json")
    assert (shown["config"]["seed"], shown["origins"]["seed"]) == (3, "override 'seed=3'")
    assert shown["origins"]["run.directory"] == "default"


def test_a_run_that_is_told_to_stop_says_so(jaxdist: Jaxdist):
    (jaxdist.folder / "script_hooks.py").write_text(STOPS)
    jaxdist.config(SHORT, run={"hooks": [{"path": "script_hooks:Stops"}]})
    assert jaxdist.here("train", "config.yaml", "--json", "a.json").code == STOPPED
    found = read(jaxdist.folder / "a.json")
    assert (found["stopped_by"], found["exit_code"]) == ("SIGTERM", STOPPED)
    assert found["step"] < 4


def test_schedules_as_json(jaxdist: Jaxdist):
    given = ("--stages", 4, "--microbatches", 8, "--json", "a.json")
    assert jaxdist.here("pipeline", "compare", *given).code == 0
    rows = {row["schedule"]: row for row in read(jaxdist.folder / "a.json")["schedules"]}
    assert 0 < rows["zb_h1"]["bubble"] < rows["1f1b"]["bubble"] < 1


def test_a_file_that_cannot_be_written_is_told(jaxdist: Jaxdist):
    jaxdist.config(SHORT)
    done = jaxdist.here("config", "show", "config.yaml", "--json", "no/such/file.json")
    assert done.code == 3
    assert "cannot write the configuration to no/such/file.json" in done.message


@pytest.mark.full
def test_quiet_is_silent_but_for_errors(jaxdist: Jaxdist):
    jaxdist.config(SHORT)
    done = jaxdist("--quiet", "train", "config.yaml", "--json", "a.json")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert read(jaxdist.folder / "a.json")["step"] == 4
    done = jaxdist("config", "show", "--quiet", "config.yaml", "seed=x")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: 1 problem in config.yaml")
