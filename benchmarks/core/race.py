"""Functions of races against torch: they start contenders, give them a model, and time their turns.

All contenders start before the first turn, and use no CPU while they wait, so that they are timed
under the same conditions. Their losses must agree before anything is timed.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from benchmarks.core.experiments import gpt
from benchmarks.core.harness import Sample, paired_ratio
from benchmarks.core.report import Figure, lacking
from benchmarks.core.team import Command, one_round, started
from jaxdist.errors import RunError
from jaxdist.runtime.environment import python_module
from jaxdist.runtime.rendezvous import free_port
from jaxdist.types import Json, JsonObject

WORLD = 2
"""The number of processes of a contender that trains in parallel; each has its own core."""
SIZES = {"layers": 4, "embed": 256, "heads": 4, "mlp": 704, "vocab": 320}
WARMUP, LOSS_TOLERANCE = 3, 1e-4
RaceEntry = tuple[str, list[Command]]


def missing() -> str | None:
    """Return the reason why a race cannot run here, or None."""
    if reason := lacking("torch"):
        return reason
    if not hasattr(os, "sched_getaffinity"):
        return "this system cannot keep a process on a core; run it on Linux"
    cores = len(os.sched_getaffinity(0))
    return f"it needs {WORLD} cores and this process has {cores}" if cores < WORLD else None


def measure(
    contenders: Callable[[Path], Iterable[RaceEntry]],
    rows: int,
    window: int,
    check_losses: Callable[[Mapping[str, float]], None],
    *,
    steps: int,
    repeats: int,
) -> dict[str, Sample]:
    """Time the steps of each contender, in turn, and return their seconds by name.

    Args:
      contenders: a function from the directory with the tokens to the contenders. The first
        contender must be jaxdist alone, which writes the initial parameters to that directory.
      rows, window: the shape of the tokens: windows, and predicted tokens of each.
      check_losses: a function that raises if the losses by contender do not agree.
      steps: the number of steps of a turn.
      repeats: the number of rounds.

    Raises:
      RunError: a contender does not get ready or ends early, or the losses do not agree.
    """
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        tokens = np.random.default_rng(0).integers(256, size=(rows, window + 1))
        np.save(directory / "tokens.npy", tokens)
        with started(contenders(directory), directory) as teams:
            check_losses({team.name: team.take_steps(WARMUP)[1] for team in teams})
            rounds = [one_round(teams, steps, index) for index in range(repeats)]
    return {team.name: Sample(tuple(r[team.name] for r in rounds)) for team in teams}


def speed(name: str, ours: Sample, torch: Sample, goal: str = "") -> Figure:
    """Compare the steps per second of jaxdist and of torch."""
    pair = (1 / ours.median, 1 / torch.median)
    return Figure(name, *pair, goal, "steps/s", paired_ratio=paired_ratio(torch, ours))


def must_agree(bench: str, name: str, loss: float, other: str, expected: float) -> None:
    """Check that the losses of two contenders agree.

    Raises:
      RunError: the losses differ.
    """
    if not math.isclose(loss, expected, rel_tol=LOSS_TOLERANCE):
        raise RunError(
            f"bench {bench}: after {WARMUP} steps {name} has loss {loss:.6f} and {other} "
            f"{expected:.6f}: the two do not train the same model, so their times say nothing; "
            "check the versions of torch and jax"
        )


def gpt_config(sizes: Mapping[str, int], window: int, batch_size: int, pieces: int) -> JsonObject:
    """Return the settings of jaxdist's experiment.

    The loop over layers is unrolled, since torch has no such loop.
    """
    model = {name: sizes[name] for name in ("layers", "embed", "heads", "mlp")}
    own = {**model, "scan_unroll": sizes["layers"]}
    return gpt(own, window=window, batch_size=batch_size, train={"microbatches": pieces})


def our_commands(config: Mapping[str, Json], directory: Path, world: int) -> list[Command]:
    """Return the commands of the processes of `benchmarks.zero.ours`."""
    module = "benchmarks.zero.ours"
    command = python_module(module, json.dumps(config), str(directory))
    if world == 1:
        return [(command, {})]
    peers = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": str(world)}
    return [(command, {**peers, "JAX_PROCESS_ID": str(rank)}) for rank in range(world)]


def torch_commands(
    program: Path, kind: str, directory: Path, sizes: Mapping[str, int]
) -> list[Command]:
    """Return the commands of torch's processes: one for the kind "alone", else `WORLD`."""
    world = 1 if kind == "alone" else WORLD
    command, given = [sys.executable, str(program), kind], json.dumps(sizes)
    return [([*command, str(rank), str(world), str(directory), given], {}) for rank in range(world)]
