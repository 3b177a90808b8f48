"""`jaxdist agent` on hosts that come and go: each example is used once in each epoch, exactly."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic_hosts import begun_by, kill
from redis_place import redis_server
from runs import Jaxdist, checkpoint, finish, metrics, wait_for_step
from warm import Process

from jaxdist.checkpoint.layout import METADATA, step_directory
from jaxdist.checkpoint.manifest import read_manifest

# Each example has a parameter, whose gradient is -1/64 where a batch has it: with a learning rate
# of 64 it counts how often it was used. The loss is less the mean count of the batch's examples:
# before an epoch's end it is less the number of the epochs before, at each step, or some example
# was used twice or left out.
COUNTING = """
import time
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxdist import Mean

class Examples:
    def __len__(self):
        return 512

    def __getitem__(self, index):
        time.sleep(0.0003)
        return {"example": np.int32(index)}

class Counts(nnx.Module):
    def __init__(self, rngs):
        self.counts = nnx.Param(jnp.zeros((512,)), dims=("features",))

def loss(module, batch):
    used = module.counts[...][batch["example"]]
    return {"loss": Mean(-(used * batch["weight"]).sum(), batch["weight"].sum())}
"""
EXAMPLES, BATCH, EPOCHS = 512, 64, 150
STEPS = EPOCHS * EXAMPLES // BATCH
CONFIG = {
    "model": {"type": "import", "path": "counting:Counts"},
    "loss": {"type": "import", "path": "counting:loss"},
    "data": {"type": "import", "path": "counting:Examples"},
    "optim": {"type": "sgd", "momentum": 0.0, "learning_rate": 64.0,
              "schedule": {"type": "constant"}},
    "train": {"epochs": float(EPOCHS), "batch_size": BATCH, "log_every": 1},
    "checkpoint": {"every": 200, "keep": 3, "memory_every": 100},
    "mesh": {"data": 2},
    "elastic": {"lease_seconds": 4.0, "settle_seconds": 1.0},
}  # fmt: skip


def agent(jaxdist: Jaxdist, name: str, meet: str = "meet", **more: Any) -> Process:
    options = [x for key, value in more.items() for x in (f"--{key}", value)]
    given = ("--rendezvous", meet, "--host", f"{name}/127.0.0.1", "--devices", 1, *options)
    return jaxdist.start("agent", "config.yaml", *given, "run.directory=run")


def prepared(jaxdist: Jaxdist) -> Path:
    (jaxdist.folder / "counting.py").write_text(COUNTING)
    jaxdist.config(CONFIG)
    return jaxdist.folder / "run"


def wait(holds: Callable[[], Any], *processes: Process) -> Any:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = holds()
        if found:
            return found
        for process in processes:
            assert process.poll() is None, finish(process)
        time.sleep(0.05)
    raise AssertionError("it did not come")


def begun(run: Path, hosts: int) -> int:
    """The newest generation that so many hosts have begun; 0: none."""
    path = run / "elastic.jsonl"
    lines = [json.loads(one) for one in path.read_text().splitlines()] if path.exists() else []
    numbers = [one["generation"] for one in lines if one["event"] == "begun"]
    newest = max(numbers, default=0)
    return newest if numbers.count(newest) == hosts else 0


def assert_each_once_an_epoch(run: Path) -> None:
    trained = [one for one in metrics(run) if one["split"] == "train"]
    assert [one["step"] for one in trained] == list(range(1, STEPS + 1))
    per_epoch = EXAMPLES // BATCH
    assert [one["loss"] for one in trained] == [-float(at // per_epoch) for at in range(STEPS)]
    found = checkpoint(run, STEPS)
    (counts,) = (x for name, x in found.items() if name.startswith("params"))
    np.testing.assert_array_equal(counts, np.full(EXAMPLES, EPOCHS))


@pytest.mark.slow  # of scripts in place of training: tests/elastic/test_hosts_agents.py
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_host_is_done_without_until_it_comes_back(jaxdist: Jaxdist, victim: int):
    run = prepared(jaxdist)
    jaxdist.config(CONFIG, checkpoint={"every": 100_000, "memory_every": 100})
    hosts = [agent(jaxdist, name, max=2) for name in "ab"]
    number = wait(lambda: begun(run, 2), *hosts)
    other = hosts[1 - victim]
    wait_for_step(other, run, 270)
    kill(hosts[victim])
    wait(lambda: begun(run, 1) > number, other)
    back = agent(jaxdist, "ab"[victim], max=2)
    wait(lambda: begun(run, 2) > number, other, back)
    told = [finish(one) for one in (other, back)]
    assert [one.code for one in told] == [0, 0], told
    out = "".join(one.out for one in told)
    assert "with mesh.data=1, train.microbatches=2" in out
    assert "mesh   {data: 1} on 1 x cpu" in out
    assert "kept in memory" in out  # the loss of a host left it whole
    (ended,) = re.findall(r"ended, at step (\d+): a host came", out)
    resumed = re.findall(r"resume from step (\d+) of", out)
    assert int(resumed[-1]) >= int(ended)  # to grow costs no step
    assert_each_once_an_epoch(run)
    newest = read_manifest(step_directory(run / "checkpoints", STEPS))
    assert newest.generation == begun(run, 2)


@pytest.mark.slow
def test_the_same_with_redis(jaxdist: Jaxdist, tmp_path: Path):
    with redis_server(tmp_path) as (address, _):
        run = prepared(jaxdist)
        hosts = [agent(jaxdist, name, address, max=2) for name in "ab"]
        number = wait(lambda: begun(run, 2), *hosts)
        wait_for_step(hosts[1], run, 30)
        kill(hosts[0])
        wait(lambda: begun(run, 1) > number, hosts[1])
        done = finish(hosts[1])
        assert done.code == 0, done
        assert_each_once_an_epoch(run)


@pytest.mark.slow
def test_a_host_that_was_frozen_and_deposed_writes_nothing_more(jaxdist: Jaxdist):
    """Alone at work it is frozen with its processes; another goes on. Then a process of it wakes
    before its agent, and would train on."""
    run = prepared(jaxdist)
    frozen = agent(jaxdist, "a")
    assert wait(lambda: begun(run, 1), frozen)
    wait_for_step(frozen, run, 30)
    pids = [frozen.pid, *begun_by(frozen.pid)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    other = agent(jaxdist, "b")
    number = wait(lambda: begun(run, 1) > 1 and begun(run, 1), other)
    for pid in pids[1:]:
        os.kill(pid, signal.SIGCONT)
    path = run / "checkpoints"
    time.sleep(3)
    mine = [read_manifest(one).generation for one in path.glob("step_*")]
    assert set(mine) <= {1, number}
    assert not list(path.glob(".tmp-g1-*"))
    frozen.send_signal(signal.SIGCONT)
    told = [finish(one) for one in (frozen, other)]
    assert [one.code for one in told] == [0, 0], told
    assert_each_once_an_epoch(run)


def test_what_a_config_gets_wrong_is_told(jaxdist: Jaxdist):
    jaxdist.config({**CONFIG, "elastic": {"lease": 1.0}})
    done = jaxdist.here("agent", "config.yaml", "--rendezvous", "meet")
    assert done.code == 2
    assert "lease" in done.message


@pytest.mark.slow
def test_one_host_that_is_noticed_leaves_for_good_and_the_others_go_on(jaxdist: Jaxdist):
    """Each host looks for the file in a folder of its own; all save, at one step."""
    run = prepared(jaxdist)
    own = jaxdist.folder / "b"
    own.mkdir()
    (own / "counting.py").write_text(COUNTING)
    meet, notice = str(jaxdist.folder / "meet"), "run.preemption.file=notice"
    jaxdist.config(CONFIG, run={"directory": str(run)})
    shutil.copy(jaxdist.folder / "config.yaml", own)
    there = Jaxdist(own, Path(jaxdist._environ["JAX_COMPILATION_CACHE_DIR"]))
    try:
        hosts = [
            one.start("agent", "config.yaml", "--rendezvous", meet, "--host", f"{name}/127.0.0.1",
                      "--devices", 1, notice, "--json", f"{name}.json")
            for one, name in ((jaxdist, "a"), (there, "b"))
        ]  # fmt: skip
        number = wait(lambda: begun(run, 2), *hosts)
        wait_for_step(hosts[0], run, 130)
        (own / "notice").touch()
        gone = finish(hosts[1])
        assert gone.code == 75, gone
        wait(lambda: begun(run, 1) > number, hosts[0])
        done = finish(hosts[0])
    finally:
        there.kill()
    assert done.code == 0, done
    assert "b leaves" in done.out
    result = json.loads((jaxdist.folder / "a.json").read_text())
    assert (result["schema"], result["exit_code"], result["run"]) == (1, 0, str(run))
    assert_each_once_an_epoch(run)
    events = [json.loads(one) for one in (run / "elastic.jsonl").read_text().splitlines()]
    assert max(one["generation"] for one in events) == number + 1
    saved = re.search(r"resume from step (\d+) of", done.out)
    assert saved is not None
    assert int(saved[1]) >= 130  # at the step at which it stopped, and not from memory
    assert "kept in memory" not in done.out


@pytest.mark.slow
def test_a_batch_that_shrinks_and_grows_with_the_hosts(jaxdist: Jaxdist):
    """The rule scales the learning rate with the batch, so that each use still counts one."""
    run = prepared(jaxdist)
    scale = {"batch_size": BATCH, "learning_rate": 64.0, "rule": "linear"}
    optim = {"type": "sgd", "momentum": 0.0, "scale_from": scale, "schedule": {"type": "constant"}}
    jaxdist.config({**CONFIG, "optim": optim}, elastic={"batch": "rescale"})
    hosts = [agent(jaxdist, name, max=2) for name in "ab"]
    number = wait(lambda: begun(run, 2), *hosts)
    wait_for_step(hosts[1], run, 130)
    kill(hosts[0])
    wait(lambda: begun(run, 1) > number, hosts[1])
    back = agent(jaxdist, "a", max=2)
    wait(lambda: begun(run, 2) > number, hosts[1], back)
    told = [finish(one) for one in (hosts[1], back)]
    assert [one.code for one in told] == [0, 0], told
    assert "with mesh.data=1, train.batch_size=32, train.rescaled_from=64" in told[0].out
    trained = [one for one in metrics(run) if one["split"] == "train"]
    last = trained[-1]["step"]
    assert [one["step"] for one in trained] == list(range(1, last + 1))
    kept = (step_directory(run / "checkpoints", last) / METADATA).read_text()
    sizes = json.loads(kept)["batch_sizes"]
    assert [size for _, size in sizes] == [64, 32, 64]
    used = 0
    for step, one in enumerate(trained):
        size = next(of for first, of in reversed(sizes) if first <= step)
        assert one["learning_rate"] == size
        earlier = np.arange(used, used + size) // EXAMPLES
        # In a batch over the end of an epoch, an example may occur twice, and its second use does
        # not yet see the first.
        assert -np.mean(earlier) <= one["loss"] <= -np.mean(np.minimum(earlier, earlier[0]))
        used += size
    found = checkpoint(run, last)
    (counts,) = (x for name, x in found.items() if name.startswith("params"))
    assert EPOCHS * EXAMPLES <= used < EPOCHS * EXAMPLES + BATCH
    assert counts.sum() == used
    assert set(counts) <= {EPOCHS, EPOCHS + 1}


def test_a_batch_that_shrinks_needs_a_rule_for_the_learning_rate(jaxdist: Jaxdist):
    prepared(jaxdist)
    jaxdist.config(CONFIG, elastic={"batch": "rescale"})
    done = jaxdist.here("train", "config.yaml", "--devices", 8, "mesh.data=8")
    assert done.code == 2
    assert "elastic.batch rescale with optim.scale_from null: " in done.message
    assert "must adapt the learning rate to the batch size; set optim.scale_from" in done.message
