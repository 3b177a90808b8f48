"""`jaxdist parity --draw`: the comparison of random configs with a single device.

Each config is trained in a child process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.draws.draw import draw, seeds_of
from benchmarks.draws.report import (
    HEADER,
    draw_line,
    draw_verdict,
    failure_text,
    outcomes_from_json,
    outcomes_to_json,
)
from benchmarks.draws.run import DrawOutcome, judge_draw
from jaxdist.config import plain_yaml
from jaxdist.errors import ConfigError, RunError, did_you_mean, os_errors_as
from jaxdist.mesh import AXES
from jaxdist.parity.children import Ended, answers
from jaxdist.parity.report import REMEDY, read_earlier, recorded
from jaxdist.parity.trace import compiled_at

WRONG = Path("runs/parity")
"""The directory for the configs of draws that differ or fail."""


def parity_draws(
    count: int,
    *,
    seed: int = 0,
    axes: Sequence[str] = (),
    jobs: int = 1,
    json_file: Path | None = None,
    resume: bool = False,
    console: Console,
) -> list[DrawOutcome]:
    """Compare `count` draws with a single device, print each outcome, and return all outcomes.

    The configs of draws that differ or fail are written to the directory `WRONG`.

    Args:
      count: the number of draws.
      seed: the seed of the first draw. Each later draw has the next seed.
      axes: names of mesh axes. Only draws in which any of these axes is larger than 1 are compared,
        or all draws if there are no names.
      jobs: the number of processes, each of which trains one draw at a time.
      json_file: a file for the results as JSON, updated after each draw, or None to write none.
      resume: whether to skip the draws that `json_file` already has.
      console: the console for the lines.

    Raises:
      ConfigError: the file cannot be resumed, or a name in `axes` is not the name of a mesh axis.
      RunError: a file cannot be written.
    """
    for name in axes:
        if name not in AXES:
            raise ConfigError(f"--axis {name} names no mesh axis: {did_you_mean(name, AXES)}")
    seeds = seeds_of(count, seed, axes)
    outcomes = _earlier(json_file, seeds) if resume and json_file else []
    left = [own for own in seeds if own not in {outcome.seed for outcome in outcomes}]
    console.print(
        f"{count} draws on up to 8 fake devices against one device, relative "
        f"differences; {compiled_at()}"
        f"{f'; {len(outcomes)} are in {json_file}' if outcomes else ''}",
        soft_wrap=True,
    )
    console.print(HEADER, style="bold")
    fresh = (
        _ended(own, answer) if isinstance(answer, Ended) else answer
        for own, answer in zip(left, answers(judge_draw, left, jobs), strict=True)
    )
    report = partial(outcomes_to_json, count=count, seed=seed, axes=axes)
    for outcome in recorded(fresh, outcomes, json_file, report, what="draws"):
        style = None if outcome.good else "bold red"
        console.print(draw_line(outcome), style=style, soft_wrap=True, markup=False)
        if not outcome.good:
            text = failure_text(outcome, _written(outcome))
            console.print(text, soft_wrap=True, markup=False)
    console.print(draw_verdict(outcomes), soft_wrap=True)
    return outcomes


def _earlier(file: Path, seeds: Sequence[int]) -> list[DrawOutcome]:
    """Return the outcomes of the given seeds that an interrupted run wrote to its file.

    Raises:
      ConfigError: the file is not a report of draws, or a seed now gives another draw than the
        draw in the file.
    """
    found = read_earlier(file, outcomes_from_json) or []
    own = [outcome for outcome in found if outcome.seed in seeds]
    for outcome in own:
        drawn = draw(outcome.seed)
        if (outcome.sections, outcome.reader) != (drawn.sections, drawn.reader):
            raise ConfigError(
                f"cannot continue {file}: seed {outcome.seed} draws another config now; {REMEDY}"
            )
    return own


def _ended(seed: int, answer: Ended) -> DrawOutcome:
    drawn = draw(seed)
    return DrawOutcome(
        seed, "failed", reason=answer.reason, sections=drawn.sections, reader=drawn.reader
    )


def _written(outcome: DrawOutcome) -> Path:
    """Write the config of a draw to a file, and return the file's path.

    Raises:
      RunError: the file cannot be written.
    """
    path = WRONG / f"draw-{outcome.seed}.yaml"
    with os_errors_as(
        RunError,
        f"cannot write the config of a draw to {path}",
        "start the command in a directory in which you may write",
    ):
        WRONG.mkdir(parents=True, exist_ok=True)
        path.write_text(plain_yaml(outcome.sections), encoding="utf-8")
    return path
