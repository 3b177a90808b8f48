"""Two stages on two processes of one core each: our pipeline against torch.distributed.pipelining.

Both sides train one model from the same parameters on the same tokens, in the same microbatches and
by the same schedules. Efficiency is half the time of one process that does all the work, microbatch
after microbatch, over that of the pipelined step: what is missing to 1 is the bubble,
communication, and the executor itself.
`python -m benchmarks.pipeline.race [REPEATS]` runs it by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.core import race
from benchmarks.core.harness import Sample
from benchmarks.core.race import SIZES, RaceEntry
from benchmarks.core.report import Figure, Listing, Report, Sheet
from jaxdist.types import JsonObject

TORCH = Path(__file__).with_name("peer")
STAGES, CHUNKS = race.WORLD, 2
"""CHUNKS on each stage, where a schedule has several."""
MICROBATCHES, ROWS, WINDOW = 8, 2, 128
"""ROWS in each microbatch."""
STEPS, REPEATS = 2, 9
GOAL = ">= 1"
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
    if race.missing():
        return {}
    rows = MICROBATCHES * ROWS
    return race.measure(contenders, rows, WINDOW, check_losses, steps=STEPS, repeats=repeats)


def check_losses(losses: Mapping[str, float]) -> None:
    """Hold every contender's loss against that of ours alone.

    Raises:
      RunError: two do not agree.
    """
    for name, loss in losses.items():
        race.must_agree("pipeline", name, loss, "ours alone", losses["ours alone"])


def contenders(directory: Path) -> Iterator[RaceEntry]:
    """Ours alone first."""
    sizes = {**SIZES, "microbatches": MICROBATCHES, "chunks": CHUNKS}
    for kind in ("alone", *PIPELINES):
        world = 1 if kind == "alone" else STAGES
        yield f"ours {kind}", race.our_commands(ours_config(kind), directory, world)
        yield f"torch {kind}", race.torch_commands(TORCH, kind, directory, sizes)


def ours_config(kind: str) -> JsonObject:
    """Our experiment."""
    config = race.gpt_config(SIZES, WINDOW, MICROBATCHES * ROWS, MICROBATCHES)
    config["model"]["remat"] = "elementwise"
    if kind == "alone":
        return config
    # torch keeps activations, too.
    pipeline = {**PIPELINES[kind], "activations": "stash"}
    return {**config, "mesh": {"stage": STAGES}, "parallel": {"pipeline": pipeline}}


def efficiency(samples: Mapping[str, Sample], side: str, kind: str) -> Sample:
    """Half the time of one process over that of the pipeline, round by round."""
    return samples[f"{side} alone"] / STAGES / samples[f"{side} {kind}"]


def figures(samples: Mapping[str, Sample]) -> list[Figure]:
    """Efficiency of each schedule over torch's, and steps a second beside torch's."""
    if not samples:
        return [Figure.skipped("pipeline efficiency over torch's", race.missing() or "")]
    found = []
    for kind, name in TORCH_NAMES.items():
        ours, torch = (efficiency(samples, side, kind) for side in SIDES)
        note = f"{STAGES} processes of one core over gloo, {MICROBATCHES} microbatches"
        title = f"pipeline efficiency, over torch {name}"
        mine, theirs = samples[f"ours {kind}"], samples[f"torch {kind}"]
        found += [
            Figure.compare(title, ours, torch, GOAL, note, unit=""),
            race.speed(f"speed, over torch {name}", mine, theirs),
        ]
    return found


def listing(samples: Mapping[str, Sample]) -> Listing:
    """List the seconds of a step, and half of one alone."""
    sheet = Sheet[tuple[str, str]](
        f"a step in {STAGES} stages, {MICROBATCHES} microbatches; ideal has the bubble alone",
        {
            "": lambda one: f"{one[0]}, {TORCH_NAMES[one[1]]}",
            "step": (lambda one: samples[" ".join(one)].median, "s"),
            "half of one alone": (lambda one: samples[f"{one[0]} alone"].median / STAGES, "s"),
            "efficiency": lambda one: f"{efficiency(samples, *one).median:.3f}",
            "ideal": lambda one: f"{ideal(one[1]):.3f}",
        },
    )
    return sheet([(side, kind) for kind in TORCH_NAMES for side in SIDES])


def ideal(kind: str) -> float:
    """The efficiency of a schedule whose transfers take no time and whose stages are alike.

    >>> ideal("1f1b")
    0.8888888888888888
    """
    chunks = PIPELINES[kind]["schedule"].get("chunks", 1)
    return MICROBATCHES / (MICROBATCHES + (STAGES - 1) / chunks)


if __name__ == "__main__":
    bench(*map(int, sys.argv[1:])).print()
