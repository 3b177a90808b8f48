"""`jaxdist train --elastic`: processes are lost, and the run goes on to the same bits."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from runs import DIGITS, Jaxdist, checkpoint, finish, metrics, wait_for_step

TRAIN = {"steps": 300, "batch_size": 64, "log_every": 1}
ELASTIC = ("--elastic", "--processes", 2, "--devices", 1)


def begun(run: Path, generation: int) -> list[int]:
    """The processes of a generation, after its first step."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for line in journal(run):
            if line["event"] == "begun" and line["generation"] == generation:
                return line["pids"]
        time.sleep(0.05)
    raise AssertionError(f"no generation {generation}")


def journal(run: Path) -> list[dict]:
    path = run / "elastic.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def same_bits(a: Path, b: Path, step: int) -> None:
    found, wanted = checkpoint(a, step), checkpoint(b, step)
    assert {n: x.tobytes() for n, x in found.items()} == {n: x.tobytes() for n, x in wanted.items()}


@pytest.mark.full
def test_lost_and_stopped_processes_change_no_bit(jaxdist: Jaxdist):
    """One is killed, then another stopped; both times all go on from a snapshot in memory."""
    jaxdist.config(train=TRAIN, eval={"every": None}, checkpoint={"every": 200})
    whole = jaxdist("train", "config.yaml", *ELASTIC, "run.directory=whole")
    assert whole.code == 0, whole
    process = jaxdist.start("train", "config.yaml", *ELASTIC, "run.directory=parts")
    parts = jaxdist.folder / "parts"
    for generation, victim, number in ((1, 1, signal.SIGKILL), (2, 0, signal.SIGSTOP)):
        pids = begun(parts, generation)
        wait_for_step(process, parts, 25 * generation)  # beyond a snapshot
        os.kill(pids[victim], number)
    done = finish(process)
    assert done.code == 0, done
    assert "process 1 of 2 ended (signal SIGKILL)" in done.out
    assert "process 0 of 2 has sent no heartbeat for" in done.out
    assert "kept in memory" in done.out
    same_bits(parts, jaxdist.folder / "whole", 300)
    steps = [one["step"] for one in metrics(parts) if one["split"] == "train"]
    assert steps == list(range(1, 301))
    assert [one["event"] for one in journal(parts)].count("begun") == 3


@pytest.mark.slow
def test_the_next_generation_goes_on_in_its_run_and_in_no_other(jaxdist: Jaxdist):
    """The first of two runs was deleted and begun again, and loses a process."""
    jaxdist.config(train=TRAIN, eval={"every": None}, checkpoint={"every": 200})
    other = jaxdist.folder / "run-2"
    other.mkdir()
    (other / "config.yaml").write_text("seed: 0")
    # No process of a run imports what merely lies in the directory of the command.
    for name in ("random", "socket", "json"):
        (jaxdist.folder / f"{name}.py").write_text("raise RuntimeError('shadowed')")
    process = jaxdist.start("train", "config.yaml", *ELASTIC, "run.directory=run", fresh=True)
    run = jaxdist.folder / "run"
    pids = begun(run, 1)
    wait_for_step(process, run, 25)
    os.kill(pids[1], signal.SIGKILL)
    done = finish(process)
    assert done.code == 0, done
    steps = [one["step"] for one in metrics(run) if one["split"] == "train"]
    assert steps == list(range(1, 301))
    assert {one["generation"] for one in journal(run)} == {1, 2}
    assert [path.name for path in other.iterdir()] == ["config.yaml"]


@pytest.mark.slow
def test_a_signal_stops_all_and_the_run_goes_on_with_resume(jaxdist: Jaxdist):
    jaxdist.config(train={**TRAIN, "steps": 2000}, eval={"every": None})
    process = jaxdist.start("train", "config.yaml", *ELASTIC, "run.directory=run")
    run = jaxdist.folder / "run"
    begun(run, 1)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.code == 75, done
    assert "SIGTERM: stopped after step" in done.out
    stopped = max(int(path.name.split("_")[1]) for path in (run / "checkpoints").glob("step_*"))
    more = jaxdist("train", "config.yaml", "--resume", *ELASTIC, "run.directory=run",
                   f"train.steps={stopped + 5}")  # fmt: skip
    assert more.code == 0, more
    assert f"resume from step {stopped} of {stopped + 5}" in more.out


SLOW_DATA = """
import os, time
import numpy as np

class Data:
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        if os.environ["JAX_PROCESS_ID"] == "1":
            time.sleep(0.002)
        rng = np.random.default_rng(index)
        return {"image": rng.random((8, 8, 1), np.float32), "label": np.int32(index % 10)}
"""


@pytest.mark.slow
def test_a_process_whose_data_is_slow_is_named(jaxdist: Jaxdist):
    """Both have the same step time; it is told who makes it, while the run goes on."""
    (jaxdist.folder / "slow_data.py").write_text(SLOW_DATA)
    data = {"type": "import", "path": "slow_data:Data", "classes": 10}
    jaxdist.config(data=data, train={**TRAIN, "steps": 500}, eval={"every": None})
    process = jaxdist.start("train", "config.yaml", *ELASTIC, "run.directory=run")
    run, deadline = jaxdist.folder / "run", time.monotonic() + 120
    while not (slow := [one for one in journal(run) if one["event"] == "slow"]):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.code == 75, done
    assert [one["process"] for one in slow] == [1]
    assert slow[0]["ratio"] > 2
    assert slow[0]["why"].endswith("the phase with the largest difference is input wait")
    assert "times as slow as the other processes" in done.out
    assert "times as slow as the other processes" in jaxdist.here("report", run).out


@pytest.mark.full
def test_what_a_config_gets_wrong_is_told_once(jaxdist: Jaxdist):
    jaxdist.config({**DIGITS, "model": {"type": "mlp", "hiden": [16]}})  # codespell:ignore
    done = jaxdist("train", "config.yaml", *ELASTIC)
    assert done.code == 2
    assert "did you mean 'hidden'" in done.message


def test_what_does_not_go_with_an_agent(jaxdist: Jaxdist):
    jaxdist.config()
    done = jaxdist.here("train", "config.yaml", "--elastic", "--devices", 8, "--process-id", 1)
    assert done.code == 2
    assert "process_id has no effect with --elastic" in done.message
