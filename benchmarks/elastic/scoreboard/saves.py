"""R08 and R04: saves that are interrupted, and old generations that wake up."""

from __future__ import annotations

import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.elastic.scoreboard import saver
from benchmarks.elastic.scoreboard.row import Row, of
from jaxdist.checkpoint.layout import step_directory, steps_present
from jaxdist.checkpoint.manifest import read_manifest
from jaxdist.errors import JaxdistError, RunError
from jaxdist.runtime.environment import python_module

CALLS = {"fsync": 40, "rename": 16, "link": 12, "unlink": 12, "mkdir": 8}
"""The system calls of a save at which the process is killed, each with the largest number of the
call."""
LONGEST_SECONDS, FROZEN_SECONDS = 0.8, 0.5
WAIT_SECONDS = 120.0


def started(run: Path, generation: int, call: str = "none", number: int = 0) -> Any:
    """Start a saving process, and wait until it is ready to save.

    Raises:
      RunError: the process ends before it is ready.
    """
    command = python_module(saver.__name__, str(run), str(generation), call, str(number))
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise RunError(f"a saving process has ended ({process.wait()})")
    return process


def killed_saves(trials: int, seed: int) -> Row:
    """Try R08: SIGKILL at a random system call of a save, or at a random moment; then restore."""
    rng, right, at_calls = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as name:
        run, newest = Path(name), 0
        for _ in range(trials):
            call = rng.choice([*CALLS, "none"])
            process = started(run, 1, call, rng.randint(1, CALLS.get(call, 1)))
            try:
                out, _ = process.communicate(timeout=rng.uniform(0.1, LONGEST_SECONDS) + 2)
                at_calls += 1
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
            newest = max([newest, *map(int, out.split())])
            # A save may have been committed before its line was printed, so the restored step may
            # be one step later than the last line.
            found = restored(run)
            right += found in (newest, newest + 1)
            newest = max(newest, found)
    words = f"the newest committed step to the bit {of(right, trials)}; {at_calls} at a call"
    return Row(words, right == trials)


def restored(run: Path) -> int:
    """Restore the newest step, and return its number; -1 if its content is wrong."""
    place = jax.numpy.ones(1).sharding
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        saver.state_of(0),
    )
    try:
        with saver.store_of(run, 1, lambda line: None) as store:
            if not store.steps():
                return 0
            found = store.restore(target)
    except JaxdistError:
        return -1
    wanted = saver.state_of(found.step)
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), found.state, wanted)
    return found.step if all(jax.tree.leaves(same)) else -1


def woken_generations(trials: int, seed: int) -> Row:
    """Try R04: freeze a generation while it saves, save in the next one, and wake the first one."""
    rng, refused = random.Random(seed), 0
    for _ in range(trials):
        with tempfile.TemporaryDirectory() as name:
            refused += refused_after(Path(name), rng)
    return Row(f"nothing of the old generation was kept {of(refused, trials)}", refused == trials)


def refused_after(run: Path, rng: random.Random) -> bool:
    """Return whether a generation that wakes has its writes refused, and ends with an error."""
    process = started(run, 1)
    try:
        process.stdout.readline()  # wait until the first step is saved
        time.sleep(rng.uniform(0.0, LONGEST_SECONDS))
        process.send_signal(signal.SIGSTOP)
        with saver.store_of(run, 2, lambda line: None) as store:
            step = max(store.steps(), default=0) + saver.STEPS
            store.save(step, saver.state_of(step), metadata={})
            store.wait()
            time.sleep(FROZEN_SECONDS)
            before = old_steps(run)
            process.send_signal(signal.SIGCONT)
            code = process.wait(WAIT_SECONDS)
            return code != 0 and old_steps(run) <= before and step in store.steps()
    finally:
        process.kill()
        process.communicate()


def old_steps(run: Path) -> set[int]:
    """Return the steps that generation 1 has committed."""
    folder = run / "checkpoints"
    found = set()
    for step in steps_present(folder):
        manifest = read_manifest(step_directory(folder, step))
        found |= {step} if manifest.generation == 1 else set()
    return found
