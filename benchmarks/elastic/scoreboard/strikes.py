"""R01, R19, R27 and R28: processes of an elastic run that are killed or stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from benchmarks.elastic.run import CONFIG, WAIT_SECONDS, started, until
from benchmarks.elastic.scoreboard.row import Row, of
from jaxdist.checkpoint.arrays import load_arrays
from jaxdist.checkpoint.layout import step_directory, steps_present
from jaxdist.checkpoint.manifest import read_manifest
from jaxdist.elastic.watch import StuckTimeouts
from jaxdist.errors import RunError
from jaxdist.heartbeat.journal import read_journal
from jaxdist.heartbeat.run_folder import left_behind
from jaxdist.metrics.goodput import joined_lives
from jaxdist.metrics.writer import read_metrics
from jaxdist.runtime.environment import python_module
from jaxdist.types import JsonObject

Process = subprocess.Popen[bytes]
MEDIAN_SECONDS, TAIL_SECONDS = 8.0, 15.0
LEAST, MOST, APART = 15, 100, 150
"""The least and most steps of a generation before its strike, and the run's steps per strike."""
SOAK_SECONDS, RARE_SECONDS = 15.0, 60.0
GOODPUT = 0.8
GROWN_BYTES, GROWN_FILES = 64 << 20, 8


@dataclass(frozen=True)
class Hit:
    """The events that followed a strike.

    Attributes:
      at: when the process was struck, in seconds since 1970.
      victim: the process.
      lost, again: the entries of the agent's journal for the loss and for the next generation.
    """

    at: float
    victim: int
    lost: JsonObject
    again: JsonObject

    @property
    def detect(self) -> float:
        """The seconds from the strike until the agent detected the loss."""
        return self.lost["time"] - self.at

    @property
    def seconds(self) -> float:
        """The seconds from the strike to the first step that had not been taken before."""
        return self.again["time"] - self.at

    @property
    def named(self) -> bool:
        """Whether the agent named the struck process."""
        return self.lost["process"] == self.victim


@contextmanager
def training(
    folder: Path, name: str, processes: int, steps: int = 10**7
) -> Iterator[tuple[Path, Process]]:
    """Start a run, with an agent if it has several processes; yield its directory and process."""
    (folder / "config.yaml").write_text(CONFIG)
    given = ["train", "config.yaml", f"run.directory={name}", f"train.steps={steps}"]
    options = ["--elastic", "--processes", str(processes)] if processes > 1 else []
    command = python_module("jaxdist.cli", *given, *options, "--devices", "1")
    with started(command, folder) as process:
        yield folder / name, process


def event(run: Path, generation: int, kind: str) -> JsonObject | None:
    """Return the first event of a kind of a generation."""
    found = (one for one in read_journal(run) if one["generation"] == generation)
    return next((one for one in found if one["event"] == kind), None)


def at_work(run: Path) -> JsonObject | None:
    """Return the "begun" event of the generation that trains now, or None if none trains.

    A generation need not follow a strike: on a busy machine a process may miss heartbeats.
    """
    found = [one for one in read_journal(run) if one["event"] in ("begun", "lost", "ended")]
    return found[-1] if found and found[-1]["event"] == "begun" else None


def last_step(run: Path) -> int:
    """Return the newest step at the end of the metrics file; 0 while the file has none."""
    if not (run / "metrics.jsonl").exists():
        return 0
    with (run / "metrics.jsonl").open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
        # The first line may be cut by the seek, and the last may not be complete yet.
        lines = file.read().decode(errors="replace").splitlines()[1:-1]
    return max((json.loads(line)["step"] for line in lines), default=0)


def strike(
    run: Path,
    process: Process,
    number: int,
    rng: random.Random,
    least: int = LEAST,
    most: int = MOST,
) -> Hit:
    """Send a signal to one of a generation's processes, at a random moment of its steps.

    Args:
      run: the directory of the run.
      process: the agent's process.
      number: the signal.
      rng: the source of the random moment and process.
      least, most: bounds of the number of steps that the generation takes before the strike.
    """
    until(lambda: at_work(run), process)
    first, after = last_step(run), rng.randint(least, most)
    until(lambda: last_step(run) >= first + after, process)
    time.sleep(0.1 * rng.random())
    # Another generation may have begun during these steps.
    begun = until(lambda: at_work(run), process)
    generation = begun["generation"]
    victim = rng.randrange(len(begun["pids"]))
    at = time.time()
    os.kill(begun["pids"][victim], number)
    again = until(lambda: event(run, generation + 1, "begun"), process)
    lost = event(run, generation, "lost")
    assert lost is not None
    return Hit(at, victim, lost, again)


def end(process: Process) -> None:
    """Wait for the end of a run.

    Raises:
      RunError: the run failed.
    """
    code = process.wait(4 * WAIT_SECONDS)
    if code:
        raise RunError(f"the run ended with exit code {code}")


def same_bits(one: Path, other: Path) -> bool:
    """Return whether two runs ended in the same state, to the bit."""
    place, states = SingleDeviceSharding(jax.devices()[0]), []
    for run in (one, other):
        newest = max(steps_present(run / "checkpoints"))
        path = step_directory(run / "checkpoints", newest).absolute()
        manifest = read_manifest(path)
        target = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
            for name, leaf in manifest.leaves.items()
        }
        states.append(load_arrays(path, manifest, target))
    first, second = states
    # Bytes are compared, since `==` equates 0.0 with -0.0 and a NaN with nothing.
    return first.keys() == second.keys() and all(
        np.asarray(first[name]).tobytes() == np.asarray(second[name]).tobytes() for name in first
    )


def lost_processes(trials: int, seed: int, processes: int = 4) -> Row:
    """Try R01: kill processes of a run repeatedly; its last state must equal an undisturbed run."""
    hits, same = struck(trials, seed, processes, signal.SIGKILL)
    seconds = [one.seconds for one in hits]
    tail = float(np.quantile(seconds, 0.95))
    words = (
        f"{trials} kills in a run of {processes} processes: last state "
        f"{'bit-equal' if same else 'another'}; recovery {median(seconds):.2f} s, p95 {tail:.2f} s"
    )
    return Row(words, same and median(seconds) <= MEDIAN_SECONDS and tail <= TAIL_SECONDS)


def stopped_processes(trials: int, seed: int, processes: int = 2) -> Row:
    """Try R19: stop processes of a run by SIGSTOP; a step of the model takes less than 0.1 s."""
    hits, same = struck(trials, seed, processes, signal.SIGSTOP)
    limit = StuckTimeouts().silent_seconds + 2 * 0.1 + 1.0  # 1 s to write the stack traces
    named = sum(one.named for one in hits)
    longest = max(one.detect for one in hits)
    words = (
        f"named {of(named, trials)}, evicted after {longest:.2f} s at most; last state "
        f"{'bit-equal' if same else 'another'}"
    )
    return Row(words, named == trials and longest <= limit and same)


def struck(trials: int, seed: int, processes: int, number: int) -> tuple[list[Hit], bool]:
    """Return the recoveries of a run, and whether it ended in the state of a run without loss."""
    rng, steps = random.Random(seed), APART * (trials + 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with training(folder, "whole", processes, steps) as (whole, process):
            end(process)
        with training(folder, "parts", processes, steps) as (parts, process):
            hits = [strike(parts, process, number, rng) for _ in range(trials)]
            end(process)
        return hits, same_bits(whole, parts)


def soak(minutes: int, seed: int) -> Row:
    """Try R27: inject a random fault every 15 s; the run must recover, and resources not grow."""
    goodput, hits, grown = timed(minutes, seed, SOAK_SECONDS, (signal.SIGKILL, signal.SIGSTOP))
    files = sum(one[1] for one in grown)
    memory = sum(one[0] for one in grown)
    left = len(left_behind())  # the agent removed earlier folders when it started
    words = (
        f"{minutes} min, {len(hits)} faults, goodput {goodput:.1%}; the agent's memory grew by "
        f"{memory / 2**20:.1f} MiB, its open files by {files}; {left} folders left in memory"
    )
    return Row(words, memory < GROWN_BYTES and files < GROWN_FILES and not left and bool(hits))


def rare_faults(minutes: int, seed: int) -> Row:
    """Try R28: kill a process every minute; goodput is the time of kept steps / wall time."""
    goodput, hits, _ = timed(minutes, seed, RARE_SECONDS, (signal.SIGKILL,))
    words = f"{goodput:.1%} of {minutes} min with {len(hits)} kills (steps kept over wall time)"
    return Row(words, goodput >= GOODPUT and bool(hits))


def timed(
    minutes: int, seed: int, apart: float, numbers: Sequence[int], processes: int = 2
) -> tuple[float, list[Hit], list[tuple[int, int]]]:
    """Return the goodput, the recoveries, and the agent's growth in bytes and open files."""
    rng, hits = random.Random(seed), []
    with tempfile.TemporaryDirectory() as name:
        folder, over = Path(name), time.monotonic() + 60 * minutes
        with training(folder, "run", processes) as (run, process):
            until(lambda: event(run, 1, "begun"), process)
            before = size_of(process.pid)
            following = time.monotonic() + apart
            while following < over:
                time.sleep(max(following - time.monotonic(), 0))
                hits.append(strike(run, process, rng.choice(numbers), rng))
                # After a recovery that took longer than `apart`, the next fault follows at once.
                following = max(following + apart, time.monotonic())
            time.sleep(max(over - time.monotonic(), 0))
            after = size_of(process.pid)
            process.send_signal(signal.SIGTERM)
            process.wait(WAIT_SECONDS)
        found = joined_lives(read_metrics(run))
        assert found is not None, "a run that has taken steps has written down its time"
        return found.goodput, hits, [(after[0] - before[0], after[1] - before[1])]


def size_of(pid: int) -> tuple[int, int]:
    """Return the resident bytes and the open files of a process, from Linux's /proc."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return 1024 * int(resident.split()[1]), len(os.listdir(f"/proc/{pid}/fd"))
