"""The output of a parity run: lines for a console, and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from jaxdist.config.files import read_json
from jaxdist.errors import ConfigError
from jaxdist.metrics.report import PACKAGES, write_json
from jaxdist.parity.cells import Combination
from jaxdist.parity.run import ParityResult
from jaxdist.parity.trace import STEPS
from jaxdist.runtime import environment
from jaxdist.types import Json, JsonObject

HEADER = (
    f"{'mesh':<26}{'zero':<6}{'reduce':<13}{'parts':<6}{'remat':<5}"
    f"{'loss':>8}{'grad':>8}{'update':>8}"
)
"""The line of column names above the lines of `combination_line`."""


def combination_line(result: ParityResult, told: dict[str, int] | None = None) -> str:
    """Return the line for a result, followed by lines for a pipeline or a reason.

    The first line has at most 80 columns.

    Args:
      result: the result of a combination.
      told: the reasons in earlier lines, with their numbers. Only the number is printed for a
        reason that is in `told`, and a new reason is added to `told`. With None, every reason is
        printed in full.

    >>> from jaxdist.parity.trace import Differences
    >>> cell = Combination("data 8", 2, "all", None, 1, "full")
    >>> print(combination_line(ParityResult(cell, "equal", Differences(0, 1e-6, 2e-6))))
    data 8                    2     null         1     full  0.0e+00 1.0e-06 2.0e-06
    >>> cell = Combination("stage 4, tensor 2", 0, "all", None, 8, "none", "whole", "zb_v", "stash")
    >>> print(combination_line(ParityResult(cell, "skipped", reason="3 heads")))
    stage 4, tensor 2         0     null         8     none  skipped (1)
        zb_v, stash
        (1) 3 heads
    """
    told = {} if told is None else told
    cell, found = result.cell, result.differences
    scope = " ici" if cell.scope == "ici" else ""
    text = (
        f"{cell.mesh:<26}{f'{cell.stage}{scope}':<6}{cell.reduce or 'null':<13}"
        f"{cell.microbatches:<6}{cell.remat[:4]:<5}"
    )
    verdict, more = result.verdict, [result.reason] if result.reason else []
    if verdict == "skipped" and more:
        known = result.reason in told
        number = told.setdefault(result.reason, len(told) + 1)
        verdict, more = f"skipped ({number})", [] if known else [f"({number}) {result.reason}"]
    if found is None:
        text += f" {verdict}"
    else:
        text += f"{found.loss:>8.1e}{found.gradient:>8.1e}{found.update:>8.1e}"
        more += [] if result.verdict == "equal" else [f"DIFFERS: {_excess(result)}"]
    pipeline = [cell.schedule, str(cell.activations)] if cell.schedule else []
    settings = [*pipeline, *(["sequence split"] if cell.sequence == "split" else [])]
    return "\n    ".join([text, *([", ".join(settings)] if settings else []), *more])


def _excess(result: ParityResult) -> str:
    found, limit = result.differences, result.limit
    assert found is not None
    assert limit is not None
    return ", ".join(
        f"{name} {value:.1e} exceeds {asdict(limit)[name]:.1e}"
        for name, value in asdict(found).items()
        if not value <= asdict(limit)[name]  # The comparison `>` would be false for NaN.
    )


def results_to_json(
    subject: str,
    results: Sequence[ParityResult],
    *,
    planned: int,
    full: bool,
    losses: Iterable[float] = (),
) -> JsonObject:
    """Return a report of all results as JSON values.

    Args:
      subject: the name of the config.
      results: the results until now.
      planned: the number of combinations of the complete run.
      full: whether the run has the option `--full`.
      losses: the loss of each step on a single device, then the held-out loss if there is one.
    """
    return {
        "subject": subject,
        "cells": "all" if full else "every two settings",
        "planned": planned,
        "steps": STEPS,
        "losses": [float(loss) for loss in losses],
        "versions": environment.versions(PACKAGES),
        "results": [
            {
                **asdict(result.cell),
                "verdict": result.verdict,
                "differences": result.differences and asdict(result.differences),
                "limit": result.limit and asdict(result.limit),
                "reason": result.reason,
            }
            for result in results
        ],
    }


def from_json(report: Mapping[str, Json]) -> list[ParityResult]:
    """Return the results in a report that `results_to_json` returned.

    Raises:
      ValueError, KeyError, TypeError: the data are not such a report.
    """
    names = [field.name for field in fields(Combination)]
    return TypeAdapter(list[ParityResult]).validate_python(
        [{**row, "cell": {name: row[name] for name in names}} for row in report["results"]]
    )


REMEDY = "choose another file with --json, or leave out --resume to overwrite this file"
T = TypeVar("T")


def recorded(
    fresh: Iterable[T],
    results: list[T],
    file: Path | None,
    report: Callable[[Sequence[T]], JsonObject],
    *,
    what: str,
) -> Iterator[T]:
    """Yield each fresh result after it was added to `results` and to the report in a file.

    Args:
      fresh: the results that are computed one after another.
      results: the earlier results, to which the fresh results are added.
      file: the JSON file of the report, or None to write no file.
      report: a function from the results until now to the report as JSON values.
      what: the contents of the report, for messages.

    Raises:
      RunError: the file cannot be written.
    """
    note = partial(write_json, file, what=what, indent=1, allow_nan=True)
    note(report(results))  # A file that cannot be written is refused before minutes of training.
    for result in fresh:
        results.append(result)
        note(report(results))
        yield result


def read_earlier(file: Path, parse: Callable[[JsonObject], T]) -> T | None:
    """Return the parsed report of an interrupted run, or None if the file does not exist.

    Args:
      file: the JSON file of the interrupted run.
      parse: a function from the JSON values to the result.

    Raises:
      ConfigError: the file cannot be read or parsed.
    """
    if not file.exists():
        return None
    try:
        return parse(read_json(file))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot continue {file}: {error!r}; {REMEDY}") from error
