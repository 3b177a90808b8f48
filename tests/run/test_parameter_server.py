"""`jaxdist train` with servers and workers as processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from runs import DIGITS, RUN, Jaxdist, checkpoint, finish, metrics, steps, wait_for_step

from jaxdist.errors import RunError

LONG = {"steps": 4000, "batch_size": 32, "log_every": 1}


def strategy(**changes: object) -> dict[str, object]:
    return {"type": "parameter_server", "workers": 2, "servers": 2, **changes}


BSP = strategy(consistency={"type": "bsp"})
CLOCKS = ("time", "step_seconds")


def of_steps(run: Path) -> list[dict[str, object]]:
    return [one for one in metrics(run) if one["split"] != "servers"]


def pid_of(role: str, number: int, parent: int) -> int:
    """The process of a child, by the name that it has given itself."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for pid in (pid for forks in children_of(parent) for pid in children_of(forks)):
            if Path(f"/proc/{pid}/comm").read_text().strip() == f"{role} {number}":
                return pid
        time.sleep(0.01)
    raise AssertionError(f"no {role} {number}")


def children_of(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


@pytest.mark.full
def test_a_run_whose_worker_is_killed(jaxdist: Jaxdist):
    """The others go on, a new one joins; what was trained is evaluated and inspected."""
    jaxdist.config(train={"steps": 400, "batch_size": 64, "log_every": 1},
                   eval={"every": None}, checkpoint={"every": 200},
                   strategy=strategy(consistency={"type": "ssp"}, servers=1))  # fmt: skip
    process = jaxdist.start("train", "config.yaml")
    wait_for_step(process, jaxdist.run, 20)
    os.kill(pid_of("worker", 1, process.pid), signal.SIGKILL)
    done = finish(process)
    assert (done.code, done.err) == (0, ""), done
    assert "worker 1 ended (signal SIGKILL): worker 2 takes its place" in done.out
    clients = (jaxdist.run / "order" / "clients.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in clients] == [
        {"first": 0, "client": client, "slot": slot} for client, slot in ((0, 0), (1, 1), (2, 1))
    ]
    assert steps(jaxdist.run) == [200, 400]
    train = [one for one in metrics(jaxdist.run) if one["split"] == "train"]
    assert [one["step"] for one in train] == list(range(1, 401))
    assert train[-1]["loss"] < train[0]["loss"] / 2
    last = [one for one in metrics(jaxdist.run) if one["split"] == "servers"][-1]
    assert last["server_0_dropped"] == last["server_0_refused"] == 0
    heldout = [one for one in metrics(jaxdist.run) if one["split"] == "heldout"][-1]
    evaluated = jaxdist.here("eval", RUN)
    assert evaluated.code == 0, evaluated
    replayed = jaxdist(
        "replay", RUN, "--json", "a.json"
    )  # XLA's flags as the run had them, not as tests do
    assert (replayed.code, replayed.out.count("the same bits")) == (0, 1), replayed
    assert json.loads((jaxdist.folder / "a.json").read_text()) == {
        "schema": 1, "run": str(RUN), "first_clock": 0, "last_clock": 400, "same": True,
        "differences": [[]],
    }  # fmt: skip
    assert heldout["accuracy"] > 0.7
    assert (jaxdist.run / "loss.png").exists()


RACKS = strategy(workers=4, servers=1, consistency={"type": "bsp"},
                 aggregation={"type": "racks", "size": 2})  # fmt: skip


@pytest.mark.slow  # in one process: tests/param_server/test_live_racks.py
def test_racks_halve_what_the_server_receives_and_bear_a_killed_worker(jaxdist: Jaxdist):
    jaxdist.config(train={"steps": 600, "batch_size": 64, "log_every": 1},
                   eval={"every": None}, checkpoint={"every": 600}, strategy=RACKS)  # fmt: skip
    process = jaxdist.start("train", "config.yaml")
    wait_for_step(process, jaxdist.run, 20)
    os.kill(pid_of("worker", 1, process.pid), signal.SIGKILL)
    done = finish(process)
    assert (done.code, done.err) == (0, ""), done
    assert "worker 1 ended (signal SIGKILL): worker 4 takes its place" in done.out
    train = [one for one in metrics(jaxdist.run) if one["split"] == "train"]
    assert [one["step"] for one in train] == list(range(1, 601))
    assert train[-1]["loss"] < train[0]["loss"] / 2
    last = [one for one in metrics(jaxdist.run) if one["split"] == "servers"][-1]
    assert last["server_0_applied"] == 2 * 600
    assert last["server_0_received_bytes"] == 2 * last["worker_0_sent_bytes"]
    assert last["server_0_dropped"] == last["server_0_refused"] == 0
    replayed = jaxdist("replay", RUN)
    assert (replayed.code, replayed.out.count("the same bits")) == (0, 1), replayed


SECURE = strategy(workers=3, consistency={"type": "bsp"}, aggregation={"type": "secure"})


@pytest.mark.full  # in one process: tests/param_server/test_secure_rounds.py
def test_masked_pushes_bear_a_killed_worker_and_not_two(jaxdist: Jaxdist):
    """And servers apply the plain fixed-point sums, to the bit: `jaxdist replay` adds those."""
    jaxdist.config(train={"steps": 300, "batch_size": 48, "log_every": 1},
                   eval={"every": None}, checkpoint={"every": 300}, strategy=SECURE)  # fmt: skip
    process = jaxdist.start("train", "config.yaml")
    wait_for_step(process, jaxdist.run, 20)
    os.kill(pid_of("worker", 1, process.pid), signal.SIGKILL)
    done = finish(process)
    assert (done.code, done.err) == (0, ""), done
    assert "worker 1 ended (signal SIGKILL): worker 3 takes its place" in done.out
    train = [one for one in metrics(jaxdist.run) if one["split"] == "train"]
    assert train[-1]["loss"] < train[0]["loss"] / 2
    replayed = jaxdist("replay", RUN)
    assert (replayed.code, replayed.out.count("the same bits")) == (0, 2), replayed

    process = jaxdist.start("train", "config.yaml", "run.directory=two", "train.steps=4000")
    wait_for_step(process, jaxdist.folder / "two", 20)
    pids = [pid_of("worker", number, process.pid) for number in (0, 2)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    done = finish(process)
    assert done.code == RunError.exit_code, done
    assert done.err.count("error:") == 1
    assert "secure aggregation: 1 of 3 clients are left in round" in done.err


@pytest.mark.slow
def test_rounds_are_stopped_and_resumed_to_the_same_bits(jaxdist: Jaxdist, tmp_path: Path):
    train = {"steps": 60, "batch_size": 64, "log_every": 1}
    jaxdist.config(train=train, eval={"every": 20}, checkpoint={"every": 20}, strategy=BSP)
    whole = jaxdist.train("run.directory=whole")
    assert whole.code == 0, whole
    parts = jaxdist.start("train", "config.yaml", "run.directory=parts")
    wait_for_step(parts, jaxdist.folder / "parts", 25)
    parts.send_signal(signal.SIGTERM)
    first = finish(parts)
    assert "SIGTERM: stopped after step" in first.out, first
    second = jaxdist.train("run.directory=parts", "--resume")
    assert second.code == 0, second
    a, b = jaxdist.folder / "whole", jaxdist.folder / "parts"
    assert of_steps(a) == of_steps(b)
    found, wanted = checkpoint(b, 60), checkpoint(a, 60)
    assert {n: x.tobytes() for n, x in found.items()} == {n: x.tobytes() for n, x in wanted.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "role", "number"),
    [(BSP, "server", 0), pytest.param(RACKS, "aggregator", 1, marks=pytest.mark.slow)],
)
def test_who_cannot_be_lost_ends_the_run_which_then_resumes(
    jaxdist: Jaxdist, strategy, role: str, number: int
):
    jaxdist.config(train=LONG, eval={"every": None}, checkpoint={"every": 10}, strategy=strategy)
    process = jaxdist.start("train", "config.yaml")
    wait_for_step(process, jaxdist.run, 25)
    os.kill(pid_of(role, number, process.pid), signal.SIGKILL)
    ended = finish(process)
    assert ended.code == 3
    assert f"{role} {number} ended (signal SIGKILL) and its state is lost" in ended.message
    newest = steps(jaxdist.run)[-1]
    done = jaxdist("train", "config.yaml", "--resume", f"train.steps={newest + 3}")
    assert done.code == 0, done
    assert f"resume from step {newest} of {newest + 3}" in done.out
    assert steps(jaxdist.run)[-1] == newest + 3


@pytest.mark.slow
def test_a_worker_that_is_stuck_is_ended_and_replaced(jaxdist: Jaxdist):
    patient = {**BSP, "servers": 1, "processes": {"deadline_seconds": 30}}
    jaxdist.config(train={**LONG, "steps": 60}, eval={"every": None}, strategy=patient)
    process = jaxdist.start("train", "config.yaml")
    wait_for_step(process, jaxdist.run, 5)
    os.kill(pid_of("worker", 0, process.pid), signal.SIGSTOP)
    done = finish(process)
    assert (done.code, done.err) == (0, ""), done
    assert "worker 0 is ended, since no worker makes progress" in done.out
    assert "worker 0 ended (signal SIGKILL): worker 2 takes its place" in done.out
    assert "worker 1 ended" not in done.out, done  # it only waits for worker 0
    assert steps(jaxdist.run)[-1] == 60


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"host": "0.0.0.0"}, "set certificates"),
        ({"token": "nowhere"}, "nowhere cannot be read"),
        ({"port": 65536}, "strategy.processes.port"),
        ({"port": 65535}, "need ports up to 65536"),
    ],
)
def test_processes_that_cannot_be_started(jaxdist: Jaxdist, changes, reason):
    sections = {**DIGITS, "train": {"steps": 2, "batch_size": 64}}
    jaxdist.config(sections, strategy=strategy(processes=changes))
    done = jaxdist.here("train", "config.yaml", "--devices", "8")
    assert done.code != 0
    assert reason in done.message


def test_a_port_that_is_taken(jaxdist: Jaxdist):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        jaxdist.config(strategy=strategy(processes={"port": port - 1}))
        done = jaxdist.here("train", "config.yaml", "--devices", "8")
    assert done.code == 2
    assert (
        f"server 1 cannot listen on 127.0.0.1, port {port}: address already in use" in done.message
    )
    assert not jaxdist.run.exists()


def test_what_cannot_be_replayed(jaxdist: Jaxdist, tmp_path: Path):
    jaxdist.config()
    (tmp_path / "config.yaml").write_bytes((jaxdist.folder / "config.yaml").read_bytes())
    done = jaxdist.here("replay", tmp_path, "--devices", "8")
    assert "not a run with strategy.type parameter_server" in done.message


@pytest.mark.full
def test_a_server_and_a_worker_of_other_hosts_give_the_numbers_of_one_device(jaxdist: Jaxdist):
    jaxdist.config(train={"steps": 12, "batch_size": 64, "log_every": 1},
                   optim={"type": "sgd", "momentum": 0.0, "learning_rate": 0.1},
                   eval={"every": None}, checkpoint={"every": 6}, strategy=BSP)  # fmt: skip
    server = jaxdist.start("servers", RUN, "--here", "--wait", "100")
    started = [
        jaxdist.start(
            "train", "config.yaml", "strategy.processes.remote_servers=1", "--resume",
            "--coordinator", "127.0.0.1:1", "--num-processes", "2", "--process-id", process,
        )
        for process in (1, 0)
    ]  # fmt: skip
    worker, first, hosted = (finish(one) for one in (*started, server))
    for done in (first, worker, hosted):
        assert (done.code, done.err) == (0, ""), done
    assert "waiting for 1 servers of other hosts" in first.out
    assert "worker 0 has ended" in worker.out
    assert "server 0 has ended" in hosted.out
    alone = jaxdist.here(
        "train", "config.yaml", "strategy={type: synchronous}", "run.directory=alone"
    )
    assert alone.code == 0, alone
    found, wanted = (
        [one["loss"] for one in metrics(run) if one["split"] == "train"]
        for run in (jaxdist.run, jaxdist.folder / "alone")
    )
    assert found == pytest.approx(wanted, rel=1e-5)
    assert steps(jaxdist.run) == [6, 12]
