"""The bench of killed processes: the time until the next step, and the number of lost steps."""

from __future__ import annotations

import itertools
import math
import os
import random
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.core.report import Figure, Report
from benchmarks.elastic import cost, peer, sigterm
from benchmarks.elastic.run import WAIT_SECONDS, started, until
from benchmarks.elastic.scoreboard import board
from benchmarks.elastic.scoreboard.strikes import strike, training
from jaxdist.errors import RunError, first_line

PROCESSES, KILLS, TORCH_KILLS = 4, 5, 3
PARTS = ("stop", "restart", "restore", "first_step")
AGENT_SECONDS, AGENT_WINDOWS = 10.0, 6
EVERY = peer.EVERY
"""The number of steps between two checkpoints, of jaxdist and of torchrun. From a recovery to the
next kill, this number of steps is taken, and a random number of further steps up to as many."""


@dataclass(frozen=True)
class Recovery:
    """The recovery from the loss of one process.

    Attributes:
      seconds: the time from the kill to the first step that had not been taken before; with
        torchrun, to the first step of any number.
      lost_steps: the number of steps that are taken a second time.
      parts: the parts of the time, by name.
    """

    seconds: float
    lost_steps: int
    parts: dict[str, float]


def bench(
    kills: int = KILLS,
    torch: str | None = None,
    sigterms: int = 0,
    scoreboard: str | None = None,
) -> Report:
    """Measure the cost of being able to resume, and kill one of four processes repeatedly.

    Args:
      kills: the number of kills.
      torch: a Python that has torch, to compare with torchrun and DDP.
      sigterms: the number of further runs that receive SIGTERM.
      scoreboard: rows of the scoreboard, which are tried instead of all other measurements; see
        `benchmarks.elastic.scoreboard.board.asked`.
    """
    if scoreboard is not None:
        return board.scoreboard(scoreboard)
    costs = cost.figures()
    ours, agent = recoveries(kills)
    seconds = [one.seconds for one in ours]
    split = ", ".join(
        f"{name.replace('_', ' ')} {statistics.median(one.parts[name] for one in ours):.2f}"
        for name in PARTS
    )
    what = f"{kills} times one of {PROCESSES} processes of this machine, an MLP of 167,178 floats"
    figures = [
        Figure("recovery, median", statistics.median(seconds), 8.0, "<= 1", "s",
               f"{what}; to the first new step; seconds to {split}; the reference is the goal"),
        Figure("recovery, 95%", float(np.quantile(seconds, 0.95)), 15.0, "<= 1", "s", what),
        agent,
        *costs,
        Figure("lost steps, most", max(one.lost_steps for one in ours), 10, "<= 1", "steps",
               "a snapshot every 10 steps; one may be under way"),
    ]  # fmt: skip
    if sigterms:
        figures.append(sigterm.figure(sigterms))
    if torch is not None:
        figures += beside_torchrun(ours, torch, min(kills, TORCH_KILLS))
    return Report("elastic", figures)


def beside_torchrun(ours: Sequence[Recovery], python: str, kills: int) -> list[Figure]:
    """Compare with recoveries under torchrun; figures are NaN if torchrun does not resume."""
    name = "recovery beside torchrun's"
    try:
        theirs = torch_recoveries(python, kills)
    except RunError as error:
        told = first_line(error)[:200]
        return [Figure(name, math.nan, math.nan, "<= 1", "s", f"torchrun did not go on: {told}")]
    time = statistics.median(one.seconds for one in ours)
    their_time = statistics.median(one.seconds for one in theirs)
    lost, their_lost = (statistics.mean(one.lost_steps for one in all) for all in (ours, theirs))
    return [
        Figure(name, time, their_time, "<= 1", "s",
               f"DDP, gloo, {kills} kills of one of {PROCESSES}; ours to the next new step, theirs "
               "to any, which is before it"),
        Figure("lost steps beside torchrun's", lost, their_lost, "<= 1", "steps",
               f"theirs goes back to a checkpoint each {EVERY} steps, as ours on disk"),
    ]  # fmt: skip


def recoveries(kills: int, seed: int = 0) -> tuple[list[Recovery], Figure]:
    """Kill processes of jaxdist, and then measure the CPU share of the idle agent.

    Raises:
      RunError: a generation does not begin.
    """
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with training(folder, "run", PROCESSES) as (run, process):
            found: list[Recovery] = []
            for _ in range(kills):
                hit = strike(run, process, signal.SIGKILL, rng, EVERY + 1, 2 * EVERY)
                parts = {part: hit.again[f"{part}_seconds"] for part in PARTS}
                resumed = re.findall(r"resume from step (\d+)", (folder / "out").read_text())
                lost = hit.lost["step"] - int(resumed[-1] if resumed else 0)
                found.append(Recovery(hit.seconds, lost, parts))
            agent = agent_figure(process.pid)
            process.send_signal(signal.SIGTERM)
            process.wait(WAIT_SECONDS)
    return found, agent


def agent_figure(process: int) -> Figure:
    """Measure the share of one core that an agent takes; Linux counts hundredths of a second."""
    ticks = os.sysconf("SC_CLK_TCK")

    def spent() -> float:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / ticks  # utime and stime

    shares = []
    for _ in range(AGENT_WINDOWS):
        before, begun = spent(), time.monotonic()
        time.sleep(AGENT_SECONDS)
        shares.append((spent() - before) / (time.monotonic() - begun))
    share = statistics.median(shares)
    return Figure(
        "agent, share of a core", share, 1.0, "<= 0.005", "cores",
        f"of the agent of {PROCESSES} processes, the median of {AGENT_WINDOWS} times "
        f"{AGENT_SECONDS:g} s; from {min(shares):.2%} to {max(shares):.2%}",
    )  # fmt: skip


def torch_recoveries(python: str, kills: int, seed: int = 0) -> list[Recovery]:
    """Kill processes of torchrun.

    Raises:
      RunError: torchrun does not resume.
    """
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
        script = [f"--max-restarts={kills + 2}", peer.__file__, str(folder), "1000000"]
        with started([python, *run, *script], folder, peer.ENVIRON) as process:
            found: list[Recovery] = []
            for _ in range(kills):
                enough = len(_lines(folder)) + EVERY + rng.randint(1, EVERY)
                until(lambda n=enough: len(_lines(folder)) >= n, process)
                before = len(_lines(folder))
                pid = int((folder / f"pid_{rng.randrange(PROCESSES)}").read_text())
                killed = time.time()
                os.kill(pid, signal.SIGKILL)
                until(lambda n=before: _went_back(_lines(folder)[n - 1 :]), process)
                lines = _lines(folder)
                at = next(n for n in range(before, len(lines)) if lines[n][1] <= lines[n - 1][1])
                lost = int(lines[at - 1][1] - lines[at][1] + 1)
                found.append(Recovery(lines[at][0] - killed, lost, {}))
    return found


def _lines(folder: Path) -> list[tuple[float, float]]:
    path = folder / "steps"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(at), float(step)) for at, step in map(str.split, lines)]


def _went_back(lines: Sequence[tuple[float, float]]) -> bool:
    pairs = itertools.pairwise(lines)
    return any(later[1] <= earlier[1] for earlier, later in pairs)
