"""SIGTERM at a random moment: the time until the checkpoint is saved and the run has ended."""

from __future__ import annotations

import random
import signal
import tempfile
import time
from pathlib import Path

from benchmarks.core.report import Figure
from benchmarks.elastic.run import until
from benchmarks.elastic.scoreboard.strikes import training
from jaxdist.checkpoint.layout import steps_present
from jaxdist.errors import STOPPED, RunError
from jaxdist.metrics.writer import read_metrics

GOAL_SECONDS = 10.0


def figure(trials: int, seed: int = 0) -> Figure:
    """Time `trials` runs, alternately with one process and with two processes under an agent.

    Raises:
      RunError: a run ended with another exit code, or without a checkpoint of its last step.
    """
    rng = random.Random(seed)
    seconds = [trial(rng, elastic=bool(index % 2)) for index in range(trials)]
    middle = sorted(seconds)[len(seconds) // 2]
    return Figure(
        "SIGTERM to the exit, most", max(seconds), GOAL_SECONDS, "<= 1", "s",
        f"{trials} runs, by turns of one process and of two under an agent; median {middle:.2f} s; "
        f"each saved its last step and ended with exit code {STOPPED}; the reference is the goal",
    )  # fmt: skip


def trial(rng: random.Random, *, elastic: bool) -> float:
    """Send SIGTERM at a random moment of a run's steps; return the seconds until the run ends.

    Raises:
      RunError: the exit code is not `STOPPED`, or there is no checkpoint of the last step.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        metrics = folder / "run" / "metrics.jsonl"
        with training(folder, "run", 2 if elastic else 1) as (_, process):
            until(lambda: metrics.exists() and metrics.read_text().count('"train"') > 2, process)
            time.sleep(2 * rng.random())
            begun = time.monotonic()
            process.send_signal(signal.SIGTERM)
            code = process.wait(10 * GOAL_SECONDS)
            taken = time.monotonic() - begun
        last = max(one["step"] for one in read_metrics(metrics) if one["split"] == "train")
        saved = steps_present(folder / "run" / "checkpoints")
        if code != STOPPED or max(saved, default=-1) != last:
            words = (folder / "out").read_text(errors="replace")[-500:]
            raise RunError(f"exit code {code}, step {last}, checkpoints of {saved}: {words}")
    return taken
