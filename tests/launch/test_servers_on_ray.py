"""Servers on a node of Ray of their own, whose actors are killed, where Ray is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from certificates import certified
from runs import Jaxdist, steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SECONDS = 240
CLICKS = {
    "model": {"type": "dlrm", "width": 4, "bottom": [4], "top": [4]},
    "data": {"type": "clicks", "fields": 3, "ids": 50, "examples": 256, "heldout_examples": 32},
    "optim": {
        "type": "sgd",
        "momentum": 0.0,
        "learning_rate": 0.5,
        "schedule": {"type": "constant"},
    },
    "train": {"steps": 200, "batch_size": 16, "log_every": 1},
    "eval": {"every": None},
    "checkpoint": {"every": 20},
}
NODES = """
import sys
from ray.cluster_utils import Cluster

head = {"num_cpus": 4, "num_gpus": 1, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
cluster.add_node(num_cpus=4)
print("at", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes on this machine, of which one seems to have a GPU."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'jaxdist[ray]'")
    if not _resolves(socket.gethostname()):
        pytest.skip("the name of this host has no address: add it to /etc/hosts")
    # Ray forks this process otherwise, in which jax has threads.
    command = [sys.executable, "-c", NODES]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield next(line[3:].strip() for line in process.stdout if line.startswith("at "))
        process.stdin.close()


def _resolves(name: str) -> bool:
    try:
        return bool(socket.gethostbyname(name))
    except OSError:
        return False


def until(condition: Callable[[], Any], process: Any) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return found


def launched(jaxdist: Jaxdist, address: str, *more: str, **strategy: Any) -> Any:
    """Begin to train on Ray with two servers on one node."""
    tls = certified(jaxdist.folder / "tls", f"DNS:{socket.gethostname()}")
    processes = {"host": "auto", "tls": tls.model_dump(mode="json")}
    given = json.dumps({"servers": 2, "processes": processes, **strategy})
    settings = "--set", f"address={address}", "--set", "insecure=true", "--servers", "1"
    on = "--on", "ray", *settings, *more
    return jaxdist.start("launch", "config.yaml", f"strategy={given}", *on)


def hybrid(jaxdist: Jaxdist, address: str, *more: str, replicas: int) -> Any:
    """Train on one mesh here, and begin to train on Ray, with tables on servers."""
    jaxdist.config(CLICKS)
    assert jaxdist.here("train", "config.yaml", "run.directory=alone").code == 0
    given = {"type": "hybrid", "replicas": replicas, "optimizer": {"type": "sgd"}}
    return launched(jaxdist, address, "--set", "gpus=1", *more, **given)


def losses(run: Path) -> dict[int, float]:
    """The loss of each step; a step that was repeated has its last."""
    if not (run / "metrics.jsonl").exists():
        return {}
    *whole, _ = (run / "metrics.jsonl").read_text().split("\n")
    lines = map(json.loads, whole)
    return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}


def actors(name: str) -> dict[int, int]:
    """The actors of a class, and the node that started each."""
    return {one: parent for one, parent, words in running() if words.startswith(f"ray::{name}")}


def running() -> Iterator[tuple[int, int, str]]:
    """Each process with its parent and its command."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            yield int(entry.name), int(parent), (entry / "cmdline").read_text()


def test_an_actor_of_a_server_is_killed_and_all_restart(jaxdist: Jaxdist, cluster: str) -> None:
    process = hybrid(jaxdist, cluster, replicas=1)
    servers = until(lambda: len(found := actors("Restarted")) == 2 and found, process)
    trains = until(lambda: actors("Process"), process)
    assert len({*servers.values()}) == 1, "both servers are on one node"
    assert not {*servers.values()} & {*trains.values()}, "no server is on a node with a GPU"
    # Steps take too little time for a test to find the run between two of them.
    until((jaxdist.run / "logs" / "table_1.log").exists, process)
    os.kill(min(servers), signal.SIGKILL)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, (out, err)
    assert "generation 1 ended (process 0: exit code 3)" in out
    alone = losses(jaxdist.folder / "alone")
    assert len(alone) == 200
    assert losses(jaxdist.run) == pytest.approx(alone, rel=1e-5)


def test_a_server_with_a_follower_is_killed_and_joins_again(jaxdist: Jaxdist, cluster: str) -> None:
    process = hybrid(jaxdist, cluster, "train.steps=100000", replicas=2)
    servers = until(lambda: len(found := actors("Restarted")) == 2 and found, process)
    until(lambda: losses(jaxdist.run), process)
    os.kill(min(servers), signal.SIGKILL)
    # Process 0 starts server 2 until Ray has restarted the actor, whose server has number 3.
    until((jaxdist.run / "logs" / "table_3.log").exists, process)
    count = max(losses(jaxdist.run))
    until(lambda: max(losses(jaxdist.run)) > count + 20, process)
    assert len(servers.keys() & actors("Restarted").keys()) == 1
    (driver,) = [one for one, parent, _ in running() if parent == process.pid]
    os.kill(driver, signal.SIGKILL)
    out, _ = process.communicate(timeout=SECONDS)
    assert "generation 1 ended" not in out
    alone, found = losses(jaxdist.folder / "alone"), losses(jaxdist.run)
    assert {step: found[step] for step in alone} == pytest.approx(alone, rel=1e-5)


def test_the_actor_of_a_worker_is_killed_and_the_run_goes_on(
    jaxdist: Jaxdist, cluster: str
) -> None:
    jaxdist.config()
    given = {"type": "parameter_server", "workers": 2, "servers": 2}
    process = launched(jaxdist, cluster, "--nodes", "3", **given)
    # Process 0 is no worker, and its actor is the only one that Ray does not restart.
    until(lambda: len(actors("Restarted")) == 4 and len(actors("Process")) == 1, process)
    until((jaxdist.run / "logs" / "worker_1.log").exists, process)
    workers = [one for one, _, words in running() if "--distributed" in words.split("\0")]
    parents = {one: parent for one, parent, _ in running()}
    (worker, *_) = [one for one in actors("Restarted") if _above(one, workers, parents)]
    os.kill(worker, signal.SIGKILL)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, (out, err)
    assert "generation 1 ended" not in out, out
    assert steps(jaxdist.run)[-1] == 24


def _above(one: int, commands: list[int], parents: dict[int, int]) -> bool:
    """Return whether a process has started one of the commands, which its child runs."""
    return any(parents.get(parents.get(command, 0)) == one for command in commands)
