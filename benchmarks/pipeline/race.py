"""A race of jaxdist's pipeline against torch.distributed.pipelining: two stages, one core each.

Both sides train one model from the same parameters on the same tokens, in the same microbatches and
by the same schedules. Efficiency is half the time of one process that does all the work, microbatch
after microbatch, divided by the time of the pipelined step. The bubble, communication and the cost
of the executor lower the efficiency below 1. `python -m benchmarks.pipeline.race [REPEATS]` runs
only this race.
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
"""The number of stages, and the number of chunks on a stage for schedules with several chunks."""
MICROBATCHES, ROWS, WINDOW = 8, 2, 128
"""The number of microbatches, the rows of each, and the tokens of a row."""
STEPS, REPEATS = 2, 9
GOAL = ">= 1"
PIPELINES: Mapping[str, JsonObject] = {
    "gpipe": {"schedule": {"type": "gpipe"}},
    "1f1b": {"schedule": {"type": "1f1b"}, "ahead": True},
    "interleaved": {"schedule": {"type": "interleaved", "chunks": CHUNKS}},
}
"""The settings of jaxdist. 1F1B has `ahead`, and so more microbatches under way. Without them its
bubble would be longer than in torch, since jaxdist's stages run in lock step."""
TORCH_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
SIDES = ("ours", "torch")


def bench(repeats: int = REPEATS) -> Report:
    """Compare efficiencies with torch; if the race cannot run, the figure has the reason.

    Raises:
      RunError: a contender ends early, or the losses do not agree.
    """
    samples = measure(repeats)
    return Report("pipeline_race", figures(samples), [listing(samples)] if samples else [])


def measure(repeats: int = REPEATS) -> dict[str, Sample]:
    """Time each contender's steps, in turn; return an empty dict if the race cannot run.

    Raises:
      RunError: a contender ends early, or the losses do not agree.
    """
    if race.missing():
        return {}
    rows = MICROBATCHES * ROWS
    return race.measure(contenders, rows, WINDOW, check_losses, steps=STEPS, repeats=repeats)


def check_losses(losses: Mapping[str, float]) -> None:
    """Check that every contender's loss agrees with the loss of "ours alone".

    Raises:
      RunError: two losses do not agree.
    """
    for name, loss in losses.items():
        race.must_agree("pipeline", name, loss, "ours alone", losses["ours alone"])


def contenders(directory: Path) -> Iterator[RaceEntry]:
    """Yield the contenders, "ours alone" first, since it writes the initial parameters."""
    sizes = {**SIZES, "microbatches": MICROBATCHES, "chunks": CHUNKS}
    for kind in ("alone", *PIPELINES):
        world = 1 if kind == "alone" else STAGES
        yield f"ours {kind}", race.our_commands(ours_config(kind), directory, world)
        yield f"torch {kind}", race.torch_commands(TORCH, kind, directory, sizes)


def ours_config(kind: str) -> JsonObject:
    """Return the settings of jaxdist's experiment for a schedule, or for one process alone."""
    config = race.gpt_config(SIZES, WINDOW, MICROBATCHES * ROWS, MICROBATCHES)
    config["model"]["remat"] = "elementwise"
    if kind == "alone":
        return config
    # For a fair race, activations are kept, as torch does.
    pipeline = {**PIPELINES[kind], "activations": "stash"}
    return {**config, "mesh": {"stage": STAGES}, "parallel": {"pipeline": pipeline}}


def efficiency(samples: Mapping[str, Sample], side: str, kind: str) -> Sample:
    """Return the efficiency by round: half of one process's time / the pipeline's time."""
    return samples[f"{side} alone"] / STAGES / samples[f"{side} {kind}"]


def figures(samples: Mapping[str, Sample]) -> list[Figure]:
    """Compare the efficiency and the steps per second of each schedule with torch."""
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
    """List the seconds of each step, and half of the time of one process alone."""
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
    """Return the efficiency of a schedule with equal stages and transfers that take no time.

    >>> ideal("1f1b")
    0.8888888888888888
    """
    chunks = PIPELINES[kind]["schedule"].get("chunks", 1)
    return MICROBATCHES / (MICROBATCHES + (STAGES - 1) / chunks)


if __name__ == "__main__":
    bench(*map(int, sys.argv[1:])).print()
