"""Two processes of two devices each: the run that one process of four devices makes."""

from __future__ import annotations

import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import flips
import numpy as np
import pytest
from runs import Finished, Jaxdist, checkpoint, finish, metrics, steps, wait_for_step
from warm import Forked

from jaxdist.runtime.environment import TIMEOUT_FLAGS
from jaxdist.runtime.rendezvous import free_port

# Sums over devices associate otherwise between processes than within one; 24 steps of Adam at a
# learning rate of 1e-3 let float32 rounding (6e-8) grow to a few 1e-6.
TOLERANCE = 2e-5

# The shipped timeout is 120 s; a device that waits for another of its own process needs it.
IMPATIENT = " ".join(f"{flag}=5" for flag in TIMEOUT_FLAGS)

FAILING = """
import jax, numpy as np

class Digits:
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index == 700 and jax.process_index() == 1:
            raise OSError("a broken sector")
        return {"image": np.zeros((8, 8, 1), np.float32), "label": np.int32(index % 10)}
"""

FLIPPING = f"""
import sys
import numpy as np
sys.path.append({str(Path(flips.__file__).parent)!r})
from flips import Flip, flipping

device = flipping(Flip([13], at_device=3))
device.__enter__()

class Images:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        image = np.random.default_rng(index).normal(size=(4, 4, 1)).astype(np.float32)
        return {{"image": image, "label": np.int32(index % 3)}}

def data():
    return Images(), Images()
"""

full = partial(pytest.param, marks=pytest.mark.full)

# What gloo's threads print while they connect: each piece is whole, lines are not.
PIECE = (
    r"(?:\[Gloo\] Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is :)"
)
GLOO = re.compile(rf"^(?:{PIECE}|\d|\s)*{PIECE}(?:{PIECE}|\d|\s)*", re.MULTILINE)

# What a process says whose peers are slow to start.
WAITING = re.compile(r"^waiting for 127\.0\.0\.1:\d+ \(.*\n", re.MULTILINE)


def pair(jaxdist: Jaxdist, *args: str, **options: Any) -> list[Forked]:
    """`jaxdist train config.yaml args...` as two processes of two devices."""
    peers = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", 2, "--devices", 2]
    return [
        jaxdist.start("train", "config.yaml", *args, *peers, "--process-id", index, **options)
        for index in range(2)
    ]


def finish_all(processes: list[Forked]) -> list[Finished]:
    """What each printed, without what gloo prints: its threads may mix the parts of their lines."""
    ended = [finish(process) for process in processes]
    return [end._replace(out=WAITING.sub("", GLOO.sub("", end.out))) for end in ended]


def test_mixed_lines_of_gloo_are_left_out() -> None:
    line = (
        "[Gloo] Rank {} is connected to 3 peer ranks. "
        "Expected number of connected peer ranks is : 3"
    )
    mixed = "[Gloo] Rank 2[Gloo] Rank  is connected to 3 is connected to 3 peer ranks. "
    assert not GLOO.sub("", "\n" + line.format(1) + "\n\n")
    assert not GLOO.sub("", mixed + line.format(2).split("ranks. ")[1] + "\n1 peer ranks. ")
    assert GLOO.sub("", line.format(0) + "\ndone step 24\n7\n") == "done step 24\n7\n"


@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [
        # Its axis and its reduction are in the rows below.
        pytest.param({"data": 4}, {}, marks=pytest.mark.slow),
        full({"data": 2, "tensor": 2}, {}),
        # In one process: tests/equivalence and tests/parallel; between two, the other four.
        pytest.param({"data": 4}, {"reduce": {"type": "xla"}}, marks=pytest.mark.slow),
        pytest.param(
            {"data": 4},
            {"reduce": {"type": "halving"}, "zero": {"stage": 1, "whole_below": 9}},
            marks=pytest.mark.slow,
        ),
        full({"data": 4}, {"reduce": {"type": "auto"}, "zero": {"stage": 3, "whole_below": 9}}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_the_numbers_of_one_process(
    jaxdist: Jaxdist, mesh: dict[str, int], parallel: dict[str, Any]
) -> None:
    """Reductions of ours pack what gloo would send one by one."""
    jaxdist.config(mesh=mesh, parallel=parallel)
    first, second = finish_all(pair(jaxdist))
    assert (first.code, second.code) == (0, 0), (first, second)
    assert "done   step 24" in first.out
    assert second.out == second.err == first.err == ""
    one = jaxdist.train("run.directory=runs/one", "--devices", 4)
    assert one.code == 0, one
    found, expected = metrics(jaxdist.run), metrics(jaxdist.folder / "runs/one")
    assert [record.keys() for record in found] == [record.keys() for record in expected]
    for a, b in zip(found, expected, strict=True):
        assert (a["step"], a["split"]) == (b["step"], b["split"])
        numbers = [[r[k] for k in r if k not in ("step", "split")] for r in (a, b)]
        np.testing.assert_allclose(*numbers, rtol=TOLERANCE)
    assert steps(jaxdist.run) == steps(jaxdist.folder / "runs/one")


@pytest.mark.parametrize(
    ("number", "to", "every"),
    [
        # One process: tests/run/test_resume.py. Told to the second alone: SIGHUP, below.
        pytest.param(signal.SIGTERM, [1], 400, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, [0, 1], 400, marks=pytest.mark.slow),
        full(signal.SIGHUP, [1], 1),
    ],
)
def test_a_signal_stops_all_and_one_process_goes_on(
    jaxdist: Jaxdist, number: signal.Signals, to: list[int], every: int
) -> None:
    total = 2000
    jaxdist.config(train={"steps": total}, eval={"every": 1000}, checkpoint={"every": every})
    processes = pair(jaxdist)
    wait_for_step(processes[0], jaxdist.run, 20)
    for index in to:
        processes[index].send_signal(number)
    first, second = finish_all(processes)
    assert (first.code, second.code) == (75, 75), (first, second)
    last = metrics(jaxdist.run)[-1]["step"]
    assert 20 <= last < total
    assert steps(jaxdist.run)[-1] == last
    told = number.name if 0 in to else "SIGTERM"
    assert f"{told}: the run stops after " in first.out
    assert f"{told}: stopped after step {last} of {total} and saved" in first.out
    assert second.out == ""
    end = last + 10
    resumed = jaxdist.train("--resume", f"train.steps={end}", "--devices", 4)
    assert resumed.code == 0, resumed
    assert f"resume from step {last} of {end}" in resumed.out
    assert f"changed since this run began: train.steps: {total} -> {end}" in resumed.out
    assert [r["step"] for r in metrics(jaxdist.run) if r["split"] == "train"] == [
        *range(1, end + 1)
    ]
    assert checkpoint(jaxdist.run, end)["step"] == end


def assert_told(survivor: Finished, index: int) -> None:
    """One line, whether Python came to say it or jax or gloo ended the process from C++."""
    assert survivor.code in (3, -signal.SIGABRT), survivor
    assert survivor.err.count("\n") == 1, survivor
    assert survivor.err.startswith(f"error: process {index} of 2 cannot continue: ")
    assert "start all of them again with --resume" in survivor.err


@pytest.mark.full
def test_a_coordinator_lost_before_the_first_record(jaxdist: Jaxdist) -> None:
    jaxdist.config(train={"steps": 100_000})
    processes = pair(jaxdist, xla_flags=IMPATIENT)
    while not (jaxdist.run / "run.lock").exists():
        assert processes[0].poll() is None, finish(processes[0])
        time.sleep(0.01)
    processes[0].kill()
    assert_told(finish(processes[1]), 1)


def test_who_waits_in_vain_says_for_whom(jaxdist: Jaxdist) -> None:
    jaxdist.config()
    address = f"127.0.0.1:{free_port()}"
    alone = ["--coordinator", address, "--num-processes", 3, "--process-id", 0]
    ended = jaxdist.train(*alone, "--join-timeout", 1)
    assert (ended.code, ended.out, ended.err.count("\n")) == (3, "", 1), ended
    told = f"error: 1 of 3 processes joined {address} within 1 s; missing: 1, 2. "
    assert ended.err.startswith(told)
    assert "or wait longer with --join-timeout SECONDS" in ended.err
    assert not (jaxdist.folder / "runs").exists()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_both_at_once(jaxdist: Jaxdist) -> None:
    """In a step or in a save; who comes second may find the other gone."""
    jaxdist.config(train={"steps": 100_000}, checkpoint={"every": 1})
    processes = pair(jaxdist, xla_flags=IMPATIENT)
    wait_for_step(processes[0], jaxdist.run, 20)
    for process in processes:
        process.send_signal(signal.SIGINT)
    while "the same signal again ends the run at once" not in processes[0].printed():
        assert processes[0].poll() is None, finish(processes[0])  # two at once would be one
        time.sleep(0.001)
    for process in processes:
        process.send_signal(signal.SIGINT)
    ended = finish_all(processes)
    assert 130 in [end.code for end in ended], ended
    for index, end in enumerate(ended):
        if end.code == 130:
            assert end.err == "interrupted\n"
        else:
            assert_told(end, index)


# A lost coordinator is above, a lost process in tests/run/test_elastic.py, and another number of
# processes that go on in the test of a signal.
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.slow
def test_a_lost_peer_ends_the_other(jaxdist: Jaxdist, lost: int) -> None:
    """By the broken connection, or else by the collective timeout; `finish` waits no longer."""
    jaxdist.config(train={"steps": 100_000}, eval={"every": 50_000})
    processes = pair(jaxdist, xla_flags=IMPATIENT)
    wait_for_step(processes[0], jaxdist.run, 20)
    processes[lost].kill()
    survivor = finish(processes[1 - lost])
    assert_told(survivor, 1 - lost)
    last = steps(jaxdist.run)[-1]
    resumed = jaxdist.train("--resume", f"train.steps={last + 1}", "--devices", 4)
    assert resumed.code == 0, resumed
    assert f"resume from step {last} of" in resumed.out


@pytest.mark.slow
def test_the_error_of_one_ends_the_other(jaxdist: Jaxdist) -> None:
    (jaxdist.folder / "mine.py").write_text(FAILING)
    jaxdist.config(
        data={"type": "import", "path": "mine:Digits", "classes": 10}, train={"steps": 100_000}
    )
    first, second = finish_all(pair(jaxdist, xla_flags=IMPATIENT))
    assert first.code in (3, -signal.SIGABRT), first
    assert second.code == 2
    assert f"example 700 raised OSError: a broken sector ({jaxdist.folder}" in second.message
    assert "mine.py:10)" in second.message


@pytest.mark.slow  # one process: tests/run/test_replicas_run.py
def test_two_processes_go_back_together(jaxdist: Jaxdist) -> None:
    (jaxdist.folder / "flipping.py").write_text(FLIPPING)
    data = {"type": "import", "path": "flipping:data", "classes": 3}
    check = {"check_replicas": {"every": 4, "on_difference": "restore"}}
    jaxdist.config(data=data, mesh={"data": 4}, train=check)
    first, second = finish_all(pair(jaxdist))
    assert (first.code, second.code) == (0, 0), (first, second)
    line = next(
        line
        for line in first.out.splitlines()
        if line.startswith("going back: replicas differ at step 16")
    )
    assert "(process 1 on " in line
    assert "resume from step 8 of 24" in first.out
    assert second.out == ""
    records = metrics(jaxdist.run)
    assert [r["step"] for r in records if r["split"] == "train"] == [*range(1, 25)]
    assert [(r["step"], r["process"]) for r in records if r["split"] == "replicas"] == [(16, 1)]
