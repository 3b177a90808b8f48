"""The output of a parity run: lines for a console, JSON, and a page of the docs.

The script `python -m jaxdist.parity.report FILE` prints the page of a JSON file.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from jaxdist.errors import ConfigError
from jaxdist.metrics import columns
from jaxdist.metrics.report import PACKAGES
from jaxdist.parity.cells import (
    ACTIVATIONS,
    MESHES,
    REDUCTIONS,
    SCHEDULES,
    SEQUENCES,
    Combination,
    possible_cells,
)
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
        return parse(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot continue {file}: {error!r}; {REMEDY}") from error


COMMAND = "jaxdist parity --json docs/parity.json"
PAGE = "python -m jaxdist.parity.report docs/parity.json > docs/parity.md"

EXTENTS = {
    "all": "all combinations without stages and with a whole sequence; for pipelines each "
    "schedule, "
    "mesh, activations and ZeRO stage up to 2; for the rest every two settings",
    "every two settings": "every two settings",
}
"""The description of each set of combinations, by the name of the set in the report."""


def parity_page(report: Mapping[str, Json]) -> str:
    """Return a page of a report: the largest difference for each setting, and the limits."""
    results = from_json(report)
    versions = report["versions"]
    full = " --full" if report["cells"] == "all" else ""
    equal = sum(result.verdict == "equal" for result in results)
    left = report["planned"] - len(results)
    later = report.get("later", 0)
    lines = [
        "# The same numbers on every plan",
        "",
        f"Generated by `{COMMAND}{full}` and",
        f"`{PAGE}`.",
        *[f"{later} combinations were compared later by themselves, and added."][: later > 0],
        "",
        f"{report['subject']}: {equal} of {len(results)} combinations equal one device over "
        f"{report['steps']} steps, float32, 8 fake CPU devices (jax {versions['jax']}, Python "
        f"{versions['python']}). The comparison covers a part of what "
        "[the table of validity](validity.md) allows: "
        f"{EXTENTS[report['cells']]}{f'; {left} more were not run' if left else ''}.",
        "",
        "Each number is the largest relative difference of the gradients that the optimizer",
        "receives, over all combinations that were run with the settings of its row and column.",
        "The number of these combinations is in brackets. `-` marks settings that cannot be",
        "combined, and an empty cell marks settings that were not run together.",
        "",
        *_reductions(results),
        "",
        "Schedules of pipelines, by what their backward pass starts from:",
        "",
        *_schedules(results),
        "",
        "The sequence between layers, on every device or split over `tensor`:",
        "",
        *_sequences(results),
        "",
        *_limits(results),
    ]
    return "\n".join(lines) + "\n"


def _reductions(results: Sequence[ParityResult]) -> list[str]:
    valid = {_place(cell) for cell in possible_cells()}
    rows = []
    for mesh, stage, scope in sorted({place[:3] for place in valid}, key=_order):
        cells = [
            _summary([r for r in results if _place(r.cell) == (mesh, stage, scope, kind)])
            if (mesh, stage, scope, kind) in valid
            else "-"
            for kind in REDUCTIONS
        ]
        rows.append([mesh, f"{stage}, ici" if scope == "ici" else str(stage), *cells])
    return columns.markdown(["mesh", "ZeRO", *(kind or "null (XLA)" for kind in REDUCTIONS)], rows)


def _schedules(results: Sequence[ParityResult]) -> list[str]:
    meshes = [mesh for mesh in MESHES if "stage" in mesh]
    rows = []
    for schedule, activations in itertools.product(SCHEDULES, ACTIVATIONS):
        own = [
            r for r in results if (r.cell.schedule, r.cell.activations) == (schedule, activations)
        ]
        cells = [_summary([r for r in own if r.cell.mesh == mesh]) for mesh in meshes]
        rows.append([schedule, activations, *cells])
    return columns.markdown(["schedule", "activations", *meshes], rows)


def _sequences(results: Sequence[ParityResult]) -> list[str]:
    rows = []
    for mesh in (mesh for mesh in MESHES if "tensor" in mesh and "stage" not in mesh):
        own = [r for r in results if r.cell.mesh == mesh]
        cells = [_summary([r for r in own if r.cell.sequence == kind]) for kind in SEQUENCES]
        rows.append([mesh, *cells])
    return columns.markdown(["mesh", *SEQUENCES], rows)


def _place(cell: Combination) -> tuple[str, int, str, str | None]:
    return cell.mesh, cell.stage, cell.scope, cell.reduce


def _order(place: tuple[str, int, str]) -> tuple[int, str, int]:
    mesh, stage, scope = place
    return list(MESHES).index(mesh), scope, stage


def _summary(results: Sequence[ParityResult]) -> str:
    unequal = [result.verdict for result in results if result.verdict != "equal"]
    if unequal:
        return f"**{', '.join(unequal)}**"
    found = [result.differences.gradient for result in results if result.differences]
    return f"{max(found):.1e} ({len(found)})" if found else ""


def _limits(results: Sequence[ParityResult]) -> list[str]:
    """Return the lines of the page about the limits, with the largest differences found."""
    judged = [result for result in results if result.differences and result.limit]
    lines = [
        "The plans differ in the order in which floats are summed. The limit of losses and",
        "gradients is k times 2 sqrt(n) 2**-24, where n is the number of tokens in a batch, and k",
        "the number of kinds of sums that a plan adds in another order. The limit of the update is",
        "ten times as large (`limit_of` in `jaxdist/parity/trace.py` gives the reason):",
        "",
    ]
    rows = []
    for cuts in sorted({r.cell.cuts for r in judged}, key=lambda cuts: (len(cuts), cuts)):
        members = [result for result in judged if result.cell.cuts == cuts]
        limit = members[0].limit
        assert limit is not None
        worst = [
            f"{max(asdict(r.differences)[field] for r in members if r.differences):.1e}"
            for field in ("loss", "gradient", "update")
        ]
        bounds = [f"{value:.0e}" for value in asdict(limit).values()]
        rows.append([", ".join(cuts), *bounds, ", ".join(worst)])
    header = ("sums in another order", "limit of loss", "gradient", "update", "largest found")
    return lines + columns.markdown(header, rows)


if __name__ == "__main__":
    print(parity_page(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), end="")
