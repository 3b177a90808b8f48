"""Two stages on two processes of one core each: our pipeline against torch.distributed.pipelining.

Both sides train one model from the same parameters on the same tokens, in the same microbatches and
by the same schedules; their losses must agree before anything is timed. Every contender is there
from the start and waits for its turn at rest, so that all of them meet the same machine. Efficiency
is half the time of one process that does all the work, microbatch after microbatch, over that of
the pipelined step: what is missing to 1 is the bubble, communication, and the executor itself.
`python -m jaxdist.bench.pipeline.race [REPEATS]` runs it by itself.
"""

from __future__ import annotations

import json
import math
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from jaxdist.bench.core.harness import Sample, paired_ratio
from jaxdist.bench.core.report import Figure, Listing, Report
from jaxdist.bench.core.team import Command, Team, one_round, started
from jaxdist.bench.zero.race import missing
from jaxdist.errors import RunError
from jaxdist.types import JsonObject

TORCH = Path(__file__).with_name("peer")
STAGES, CHUNKS = 2, 2
"""CHUNKS on each stage, where a schedule has several."""
SIZES = {"layers": 4, "embed": 256, "heads": 4, "mlp": 704, "vocab": 320}
MICROBATCHES, ROWS, WINDOW = 8, 2, 128
"""ROWS in each microbatch."""
STEPS, WARMUP, REPEATS = 2, 3, 9
GOAL, LOSS_TOLERANCE = ">= 1", 1e-4
PIPELINES: Mapping[str, JsonObject] = {
    "gpipe": {"schedule": {"type": "gpipe"}},
    "1f1b": {"schedule": {"type": "1f1b"}, "ahead": True},
    "interleaved": {"schedule": {"type": "interleaved", "chunks": CHUNKS}},
}
"""Ours run in lock step, in which 1F1B needs one microbatch more under way for the same bubble."""
TORCH_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
SIDES = ("ours", "torch")


def bench(repeats: int = REPEATS) -> Report:
    """Efficiency over torch's; where the race cannot be run, a figure that says why.

    Raises:
      RunError: a contender ends early, or the losses do not agree.
    """
    samples = measure(repeats)
    return Report("pipeline_race", figures(samples), [listing(samples)] if samples else [])


def measure(repeats: int = REPEATS) -> dict[str, Sample]:
    """Seconds a step of each contender, in turn; nothing where the race cannot be run.

    Raises:
      RunError: a contender ends early, or the losses do not agree.
    """
    if missing():
        return {}
    with teams() as contenders:
        check_losses({team.name: team.take_steps(WARMUP)[1] for team in contenders})
        rounds = [one_round(contenders, STEPS, index) for index in range(repeats)]
    return {team.name: Sample(tuple(r[team.name] for r in rounds)) for team in contenders}


def check_losses(losses: Mapping[str, float]) -> None:
    """Hold every contender's loss against that of ours alone.

    Raises:
      RunError: two do not agree.
    """
    expected = losses["ours alone"]
    for name, loss in losses.items():
        if not math.isclose(loss, expected, rel_tol=LOSS_TOLERANCE):
            raise RunError(
                f"bench pipeline: after {WARMUP} steps {name} has loss {loss:.6f} and ours alone "
                f"{expected:.6f}: the two do not train the same model, so their times say nothing; "
                "check the versions of torch and jax"
            )


@contextmanager
def teams() -> Iterator[list[Team]]:
    """All contenders, ready; they end with the context, whatever happens.

    Raises:
      RunError: one does not get ready.
    """
    with tempfile.TemporaryDirectory() as folder:
        directory, rng = Path(folder), np.random.default_rng(0)
        tokens = rng.integers(256, size=(MICROBATCHES * ROWS, WINDOW + 1))
        np.save(directory / "tokens.npy", tokens)
        # Ours alone is first: torch starts from the parameters that it leaves in the directory.
        contenders = (
            (f"{side} {kind}", commands(kind, directory))
            for kind in ("alone", *PIPELINES)
            for side, commands in zip(SIDES, (_ours, _torch), strict=True)
        )
        with started(contenders, directory) as found:
            yield found


def ours_config(kind: str) -> JsonObject:
    """Our experiment; its loop over layers is unrolled, as torch has none."""
    sizes = {name: SIZES[name] for name in ("layers", "embed", "heads", "mlp")}
    config: JsonObject = {
        "model": {"type": "gpt", **sizes, "scan_unroll": SIZES["layers"], "remat": "elementwise"},
        "data": {"type": "synthetic", "kind": "tokens", "window": WINDOW, "heldout_examples": 0},
        "optim": {"type": "adamw", "learning_rate": 1e-3},
        "train": {
            "steps": 10**6,
            "batch_size": MICROBATCHES * ROWS,
            "microbatches": MICROBATCHES,
        },
    }
    if kind == "alone":
        return config
    # torch keeps activations, too.
    pipeline = {**PIPELINES[kind], "activations": "stash"}
    return {**config, "mesh": {"stage": STAGES}, "parallel": {"pipeline": pipeline}}


def _ours(kind: str, directory: Path) -> list[Command]:
    config = json.dumps(ours_config(kind))
    command = [sys.executable, "-m", "jaxdist.bench.zero.ours", config, str(directory)]
    if kind == "alone":
        return [(command, {})]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    peers = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(STAGES)}
    return [(command, {**peers, "JAX_PROCESS_ID": str(rank)}) for rank in range(STAGES)]


def _torch(kind: str, directory: Path) -> list[Command]:
    world = 1 if kind == "alone" else STAGES
    sizes = json.dumps({**SIZES, "microbatches": MICROBATCHES, "chunks": CHUNKS})
    program = [sys.executable, str(TORCH), kind]
    return [([*program, str(rank), str(world), str(directory), sizes], {}) for rank in range(world)]


def efficiency(samples: Mapping[str, Sample], side: str, kind: str) -> Sample:
    """Half the time of one process over that of the pipeline, round by round."""
    pairs = zip(samples[f"{side} alone"].seconds, samples[f"{side} {kind}"].seconds, strict=True)
    return Sample(tuple(alone / STAGES / pipelined for alone, pipelined in pairs))


def figures(samples: Mapping[str, Sample]) -> list[Figure]:
    """Efficiency of each schedule over torch's, and steps a second beside torch's."""
    if not samples:
        note = f"skipped: {missing()}"
        return [Figure("pipeline efficiency over torch's", math.nan, math.nan, unit="", note=note)]
    found = []
    for kind, name in TORCH_NAMES.items():
        ours, torch = (efficiency(samples, side, kind) for side in SIDES)
        note = f"{STAGES} processes of one core over gloo, {MICROBATCHES} microbatches"
        values = (ours.median, torch.median, GOAL, "", note, ours.iqr, torch.iqr)
        ratio = paired_ratio(ours, torch)
        found.append(Figure(f"pipeline efficiency, over torch {name}", *values, ratio))
        mine, theirs = samples[f"ours {kind}"], samples[f"torch {kind}"]
        speed = (1 / mine.median, 1 / theirs.median, "", "steps/s")
        ratio = paired_ratio(theirs, mine)
        found.append(Figure(f"speed, over torch {name}", *speed, paired_ratio=ratio))
    return found


def listing(samples: Mapping[str, Sample]) -> Listing:
    """What a step takes, and half of one alone."""
    rows = [
        (
            f"{side}, {name}",
            samples[f"{side} {kind}"].median,
            samples[f"{side} alone"].median / STAGES,
            f"{efficiency(samples, side, kind).median:.3f}",
            f"{ideal(kind):.3f}",
        )
        for kind, name in TORCH_NAMES.items()
        for side in SIDES
    ]
    return Listing(
        f"a step in {STAGES} stages, {MICROBATCHES} microbatches; ideal has the bubble alone",
        {"": "", "step": "s", "half of one alone": "s", "efficiency": "", "ideal": ""},
        rows,
    )


def ideal(kind: str) -> float:
    """The efficiency of a schedule whose transfers take no time and whose stages are alike.

    >>> ideal("1f1b")
    0.8888888888888888
    """
    chunks = PIPELINES[kind]["schedule"].get("chunks", 1)
    return MICROBATCHES / (MICROBATCHES + (STAGES - 1) / chunks)


if __name__ == "__main__":
    bench(*map(int, sys.argv[1:])).print()
