"""Two processes of one core each: our data parallelism and ZeRO against torch's DDP and FSDP2.

Both sides train one model from the same parameters on the same tokens; their losses must agree
before anything is timed. Every contender is there from the start and waits for its turn at rest, so
that all of them meet the same machine. Efficiency is the time of one process alone over that of two
together, each with the same work; what two take beyond one is communication, and waiting for the
slower core. `python -m jaxdist.bench.zero.race [REPEATS]` runs it by itself.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from jaxdist.bench.core.harness import Sample, paired_ratio
from jaxdist.bench.core.report import Figure, Listing, Report
from jaxdist.bench.core.team import Command, Team, one_round, started
from jaxdist.errors import RunError
from jaxdist.types import JsonObject

TORCH = Path(__file__).with_name("torch_peer")
WORLD = 2
SIZES = {"layers": 4, "embed": 256, "heads": 4, "mlp": 704, "vocab": 320}
BATCH, WINDOW = 8, 128
"""Of one process."""
MICROBATCHES = 4
"""Of ours where gradients are summed once: XLA:CPU computes few rows at a time faster, torch is as
fast either way. Stage 3 would gather its parameters for each of them, and takes the batch whole."""
STEPS, WARMUP, REPEATS = 3, 3, 12
EFFICIENCY_GOAL, SPEED_GOAL, LOSS_TOLERANCE = ">= 1", ">= 0.8", 1e-4
FORMS: Mapping[str, JsonObject] = {
    "ddp": {"reduce": {"type": "halving"}, "zero": {"stage": 0}},
    "fsdp": {"reduce": {"type": "auto"}, "zero": {"stage": 3}},
}
"""What of ours meets which of torch's. The permutes behind `halving`, and behind `auto` for
gathers, take half the time over gloo of its own all-reduce and gather, which are behind `xla`."""
ALONE = {"ddp": "alone", "fsdp": "alone, whole"}
"""What ours does in one process with the same work; torch's is "alone" for both."""
PAIRS = (("ddp", "stage 0", "DDP"), ("fsdp", "stage 3", "FSDP2"))


def bench(repeats: int = REPEATS) -> Report:
    """Efficiency and speed over torch's; where the race cannot be run, a figure that says why.

    Raises:
      RunError: a contender ends early, or the losses do not agree.
    """
    if reason := missing():
        nothing = Figure("torch", math.nan, math.nan, unit="", note=f"skipped: {reason}")
        return Report("zero_race", [nothing])
    samples = measure(repeats)
    return Report("zero_race", figures(samples), [listing(samples)])


def missing() -> str | None:
    """What the race lacks here; None when it can be run."""
    if find_spec("torch") is None:
        return "torch is not installed: pip install 'jaxdist[peers]'"
    if not hasattr(os, "sched_getaffinity"):
        return "this system cannot keep a process on a core; run it on Linux"
    cores = len(os.sched_getaffinity(0))
    return f"it needs {WORLD} cores and this process has {cores}" if cores < WORLD else None


def measure(repeats: int = REPEATS) -> dict[str, Sample]:
    """Seconds a step of each contender, in turn.

    Raises:
      RunError: a contender ends early, or the losses do not agree.
    """
    with teams() as contenders:
        check_losses({team.name: team.take_steps(WARMUP)[1] for team in contenders})
        rounds = [one_round(contenders, STEPS, index) for index in range(repeats)]
    return {team.name: Sample(tuple(r[team.name] for r in rounds)) for team in contenders}


def check_losses(losses: Mapping[str, float]) -> None:
    """Hold our losses against torch's, by contender.

    Raises:
      RunError: two that should agree do not.
    """
    for kind in (*ALONE.values(), *FORMS):
        other = "alone" if kind in ALONE.values() else kind
        ours, torch = losses[f"ours {kind}"], losses[f"torch {other}"]
        if not math.isclose(ours, torch, rel_tol=LOSS_TOLERANCE):
            raise RunError(
                f"bench zero: after {WARMUP} steps {kind} has loss {ours:.6f} with jaxdist and "
                f"{torch:.6f} with torch: the two do not train the same model, so their times say "
                "nothing; check the versions of torch and jax"
            )


@contextmanager
def teams() -> Iterator[list[Team]]:
    """All contenders, ready; they end with the context, whatever happens.

    Raises:
      RunError: one does not get ready.
    """
    with tempfile.TemporaryDirectory() as folder:
        directory, rng = Path(folder), np.random.default_rng(0)
        np.save(directory / "tokens.npy", rng.integers(256, size=(WORLD * BATCH, WINDOW + 1)))
        # Ours alone is first: torch starts from the parameters that it leaves in the directory.
        contenders = (
            (f"{side} {kind}", commands(kind, directory))
            for kind in (*ALONE.values(), *FORMS)
            for side, commands in (("ours", _ours), ("torch", _torch))
            if (side, kind) != ("torch", ALONE["fsdp"])
        )
        with started(contenders, directory) as found:
            yield found


def ours_config(kind: str) -> JsonObject:
    """Our experiment; its loop over layers is unrolled, as torch has none."""
    world = 1 if kind in ALONE.values() else WORLD
    pieces = MICROBATCHES if kind in ("ddp", ALONE["ddp"]) else 1
    sizes = {name: SIZES[name] for name in ("layers", "embed", "heads", "mlp")}
    return {
        "model": {"type": "gpt", **sizes, "scan_unroll": SIZES["layers"]},
        "data": {"type": "synthetic", "kind": "tokens", "window": WINDOW, "heldout_examples": 0},
        "optim": {"type": "adamw", "learning_rate": 1e-3},
        "train": {"steps": 10**6, "batch_size": BATCH * world, "microbatches": pieces},
        "mesh": {"data": world},
        "parallel": FORMS.get(kind, {}),
    }


def _ours(kind: str, directory: Path) -> list[Command]:
    config = json.dumps(ours_config(kind))
    command = [sys.executable, "-m", "jaxdist.bench.zero.ours", config, str(directory)]
    if kind in ALONE.values():
        return [(command, {})]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    peers = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(WORLD)}
    return [(command, {**peers, "JAX_PROCESS_ID": str(rank)}) for rank in range(WORLD)]


def _torch(kind: str, directory: Path) -> list[Command]:
    world = 1 if kind == "alone" else WORLD
    sizes = json.dumps({**SIZES, "batch": BATCH})
    program = [sys.executable, str(TORCH), kind]
    return [([*program, str(rank), str(world), str(directory), sizes], {}) for rank in range(world)]


def figures(samples: Mapping[str, Sample]) -> list[Figure]:
    """Efficiency over torch's, and torch's time over ours."""
    found = []
    for kind, ours, torch in PAIRS:
        mine, theirs = samples[f"ours {kind}"], samples[f"torch {kind}"]
        efficiency = [
            Sample(tuple(a / b for a, b in zip(samples[alone].seconds, two.seconds, strict=True)))
            for alone, two in ((f"ours {ALONE[kind]}", mine), ("torch alone", theirs))
        ]
        note = f"{WORLD} processes of one core over gloo, the time of one alone over that of both"
        versus = f"{ours} over torch {torch}"
        found.append(
            Figure(
                f"parallel efficiency, {versus}",
                efficiency[0].median,
                efficiency[1].median,
                EFFICIENCY_GOAL,
                "",
                note,
                efficiency[0].iqr,
                efficiency[1].iqr,
                paired_ratio(*efficiency),
            )
        )
        speed = (1 / mine.median, 1 / theirs.median, SPEED_GOAL, "steps/s")
        found.append(Figure(f"speed, {versus}", *speed, paired_ratio=paired_ratio(theirs, mine)))
    return found


def listing(samples: Mapping[str, Sample]) -> Listing:
    """How much of each step is compute, and how much communication."""
    rows = []
    for kind, ours, torch in PAIRS:
        sides = (("ours", f"ours, {ours}", ALONE[kind]), ("torch", f"torch, {torch}", "alone"))
        for side, name, alone in sides:
            step, compute = samples[f"{side} {kind}"].median, samples[f"{side} {alone}"].median
            rows.append((name, step, compute, step - compute))
    columns = ("step", "compute", "communication")
    return Listing(
        "a step of two processes; compute is a step of one process alone, the rest communication "
        "and waiting",
        {"": "", **dict.fromkeys(columns, "s")},
        rows,
    )


if __name__ == "__main__":
    bench(*map(int, sys.argv[1:])).print()
