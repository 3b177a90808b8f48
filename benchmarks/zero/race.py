"""A race of jaxdist's data parallelism and ZeRO against torch's DDP and FSDP2.

There are two processes of one core each. jaxdist and torch train the same model from the same
parameters on the same tokens. Efficiency is the time of one process alone, divided by the time of
two processes together, each with the same work. The additional time of two processes is
communication, and waiting for the slower core.
`python -m benchmarks.zero.race [REPEATS]` runs only this race.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.core import race
from benchmarks.core.harness import Sample
from benchmarks.core.race import SIZES, WORLD, RaceEntry
from benchmarks.core.report import Figure, Listing, Report
from benchmarks.core.team import Command
from jaxdist.types import JsonObject

TORCH = Path(__file__).with_name("torch_peer")
BATCH, WINDOW = 8, 128
"""The rows of one process, and the tokens of a row."""
MICROBATCHES = 4
"""The number of jaxdist's microbatches in stage 0: XLA:CPU is faster with few rows at a time, while
torch is equally fast either way. Stage 3 would gather its parameters for each microbatch, so it
takes the batch as a whole."""
STEPS, REPEATS = 3, 12
EFFICIENCY_GOAL, SPEED_GOAL = ">= 1", ">= 0.8"
FORMS: Mapping[str, JsonObject] = {
    "ddp": {"reduce": {"type": "halving"}, "zero": {"stage": 0}},
    "fsdp": {"reduce": {"type": "auto"}, "zero": {"stage": 3}},
}
"""The settings of jaxdist for each form of torch. Over gloo, the permutes of `halving`, and of the
gathers of `auto`, take half the time of gloo's own all-reduce and gather, which `xla` uses."""
ALONE = {"ddp": "alone", "fsdp": "alone, whole"}
"""The single-process contender of jaxdist with the same work, by form; torch has only "alone"."""
PAIRS = (("ddp", "stage 0", "DDP"), ("fsdp", "stage 3", "FSDP2"))


def bench(repeats: int = REPEATS) -> Report:
    """Compare efficiency and speed with torch; if the race cannot run, the figure has the reason.

    Raises:
      RunError: a contender ends early, or the losses do not agree.
    """
    if reason := race.missing():
        return Report("zero_race", [Figure.skipped("torch", reason)])
    samples = measure(repeats)
    return Report("zero_race", figures(samples), [listing(samples)])


def measure(repeats: int = REPEATS) -> dict[str, Sample]:
    """Time each contender's steps, in turn; see `race.measure`."""
    rows = WORLD * BATCH
    return race.measure(contenders, rows, WINDOW, check_losses, steps=STEPS, repeats=repeats)


def check_losses(losses: Mapping[str, float]) -> None:
    """Check that the losses of jaxdist's contenders agree with the losses of torch's contenders.

    Raises:
      RunError: two losses that should agree do not.
    """
    for kind in (*ALONE.values(), *FORMS):
        ours, torch = f"ours {kind}", f"torch {'alone' if kind in ALONE.values() else kind}"
        race.must_agree("zero", ours, losses[ours], torch, losses[torch])


def contenders(directory: Path) -> Iterator[RaceEntry]:
    """Yield the contenders: "ours alone" first; torch has a single contender "alone"."""
    for kind in (*ALONE.values(), *FORMS):
        yield f"ours {kind}", _ours(kind, directory)
        if kind != ALONE["fsdp"]:
            sizes = {**SIZES, "batch": BATCH}
            yield f"torch {kind}", race.torch_commands(TORCH, kind, directory, sizes)


def ours_config(kind: str) -> JsonObject:
    """Return the settings of jaxdist's experiment."""
    world = 1 if kind in ALONE.values() else WORLD
    pieces = MICROBATCHES if kind in ("ddp", ALONE["ddp"]) else 1
    config = race.gpt_config(SIZES, WINDOW, BATCH * world, pieces)
    return {**config, "mesh": {"data": world}, "parallel": FORMS.get(kind, {})}


def _ours(kind: str, directory: Path) -> list[Command]:
    world = 1 if kind in ALONE.values() else WORLD
    return race.our_commands(ours_config(kind), directory, world)


def figures(samples: Mapping[str, Sample]) -> list[Figure]:
    """Compare the efficiency and the steps per second with torch."""
    found = []
    for kind, ours, torch in PAIRS:
        mine, theirs = samples[f"ours {kind}"], samples[f"torch {kind}"]
        efficiency = (samples[f"ours {ALONE[kind]}"] / mine, samples["torch alone"] / theirs)
        note = f"{WORLD} processes of one core over gloo, the time of one alone over that of both"
        versus = f"{ours} over torch {torch}"
        found += [
            Figure.compare(
                f"parallel efficiency, {versus}", *efficiency, EFFICIENCY_GOAL, note, unit=""
            ),
            race.speed(f"speed, {versus}", mine, theirs, SPEED_GOAL),
        ]
    return found


def listing(samples: Mapping[str, Sample]) -> Listing:
    """List the time of each step, and its parts of compute and communication."""
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
