"""The step times of jaxdist, of torch and of torch.compile, on one core and with the same batch.

Each of the three has a process, and the processes take steps in turn. The number of parameters, the
shapes of a batch and the optimizer are the same; initial values and examples differ.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.core.harness import Sample, paired_ratio
from benchmarks.core.report import Figure
from benchmarks.core.team import Command, Team, started
from jaxdist.runtime.environment import python_module

REPEATS, WARMUP, GOAL = 5, 2, ">= 0.9"
ONE = "mesh={data: 1}"
RESNET = Path("configs/resnet/fashion.yaml")
_IMAGES = (
    "data={type: synthetic, kind: images, height: 28, width: 28, channels: 1, "
    "transform: {type: scale, mean: 127.0, std: 64.0}}"
)
_TOKENS = "data={type: synthetic, kind: tokens, vocab_size: 256, window: 128, masking: {}}"
ADAMW = "optim={type: adamw, learning_rate: 1e-3}"
VIT = "model={type: vit, patch: 4, layers: 12, embed: 384, heads: 6}"


@dataclass(frozen=True)
class Raced:
    """A model that races against the same model in torch.

    Attributes:
      path: the config.
      overrides: the overrides of the config.
      batch: the batch size.
    """

    path: Path
    overrides: Sequence[str]
    batch: int


MODELS: Mapping[str, Raced] = {
    "ResNet-18": Raced(RESNET, ["model.width=64", _IMAGES], 16),
    "BERT-small": Raced(
        Path("configs/bert/small.yaml"),
        [_TOKENS, ADAMW, "model.scan_unroll=4", "train.microbatches=4"],
        64,
    ),
    "ViT-small": Raced(RESNET, [VIT, _IMAGES, "model.scan_unroll=12"], 8),
}
"""The loops over layers are unrolled, since torch has no such loops. Microbatches are faster on
XLA:CPU, while torch is equally fast either way."""


def steps(torch: str | None, names: Sequence[str] = tuple(MODELS)) -> Iterator[Figure]:
    """Compare the speeds of models with the faster one of torch and torch.compile.

    Raises:
      RunError: a process ends early or is not ready in time.
    """
    python = torch or sys.executable
    found = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True)
    for name in names:
        if found.returncode:
            reason = (found.stderr.strip().splitlines() or ["no output"])[-1]
            yield Figure.skipped(f"{name}: speed", reason)
            continue
        yield from compared(name, measure(name, python))


def measure(name: str, python: str) -> dict[str, list[tuple[float, float]]]:
    """Return the CPU seconds and the wall seconds of steps, by the name of the contender.

    Raises:
      RunError: a process ends early or is not ready in time.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        started(commands(name, python), Path(folder)) as teams,
    ):
        for team in teams:
            team.take_steps(WARMUP)
        took: dict[str, list[tuple[float, float]]] = {team.name: [] for team in teams}
        for index in range(REPEATS):
            first = index % len(teams)
            for team in (*teams[first:], *teams[:first]):
                took[team.name].append(one_step(team))
    return took


def commands(name: str, python: str) -> Iterator[tuple[str, list[Command]]]:
    """Yield each contender's name and its command."""
    raced = MODELS[name]
    given = [str(raced.path), *raced.overrides, ONE, f"train.batch_size={raced.batch}"]
    yield "jaxdist", [(python_module("benchmarks.jobs.own_steps", *given), {})]
    peer = [python, str(Path(__file__).with_name("peer_steps")), name]
    for kind in ("eager", "compiled"):
        alone = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        yield kind, [([*peer, kind, str(raced.batch)], alone)]


def one_step(team: Team) -> tuple[float, float]:
    """Take a step, and return its CPU seconds and its wall seconds.

    Raises:
      RunError: the process has ended, or does not answer in time.
    """
    team.children[0].say(1)
    (answer,) = team.answers()
    return answer["cpu"], answer["seconds"]


def compared(name: str, took: Mapping[str, Sequence[tuple[float, float]]]) -> Iterator[Figure]:
    """Compare the CPU seconds of steps with the faster of torch and torch.compile.

    >>> took = {"jaxdist": [(2.0, 4.0)], "eager": [(3.0, 3.0)], "compiled": [(1.0, 1.0)]}
    >>> (figure,) = compared("mine", took)
    >>> figure.ours, figure.reference, figure.ratio, figure.holds
    (0.5, 1.0, 0.5, False)
    """
    cpu, wall = (
        {who: Sample(tuple(pair[i] for pair in pairs)) for who, pairs in took.items()}
        for i in (0, 1)
    )
    fastest = min(("eager", "compiled"), key=lambda kind: cpu[kind].median)
    shown = ", ".join(f"{who} {cpu[who].median:.3f} ({wall[who].median:.3f})" for who in took)
    ours, theirs = cpu["jaxdist"], cpu[fastest]
    yield Figure(
        f"{name}: speed over torch {fastest}",
        1 / ours.median,
        1 / theirs.median,
        GOAL,
        "steps/s",
        f"one core; CPU seconds of a step (and wall seconds): {shown}",
        paired_ratio=paired_ratio(theirs, ours),
    )
