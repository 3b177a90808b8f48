"""Figures over several runs: the range of each ratio on different days and machines.

`jaxdist bench NAME --record DIR` adds a line for the run to `DIR/NAME.jsonl`;
`python -m benchmarks.core.ranges DIR` prints the page of all recorded runs.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.core.report import Report, holds, show, versions
from jaxdist.columns import Columns, cells
from jaxdist.columns import markdown as markdown_table
from jaxdist.errors import JaxdistError
from jaxdist.types import Json, JsonObject

ENOUGH_RUNS = 5
"""The smallest number of runs that show how much a figure varies with the machine's load."""
KEPT = ("name", "ratio", "goal", "ours", "reference", "unit")


@dataclass(frozen=True)
class Range:
    """The values of a figure in all recorded runs.

    Attributes:
      name: the name of the figure.
      ratios: ours / reference, for each run.
      goal: the goal in the newest run, or empty if the figure is only shown.
      timed: whether the figure varies with the machine; counts read from a program do not.
      ours, reference: the values of the newest run, with their unit, or empty if only the ratio was
        recorded.
    """

    name: str
    ratios: tuple[float, ...]
    goal: str
    timed: bool = True
    ours: str = ""
    reference: str = ""

    @property
    def median(self) -> float:
        """The median of the ratios over the runs."""
        return statistics.median(self.ratios)

    @property
    def few(self) -> bool:
        """Whether the runs are too few to show how much the figure varies between runs."""
        return self.timed and len(self.ratios) < ENOUGH_RUNS

    @property
    def holds(self) -> bool | None:
        """Whether the median meets the goal, or None without a goal."""
        return holds(self.goal, self.median)


def record(report: Report, directory: Path) -> Path:
    """Add the figures of a run to `directory/NAME.jsonl`, and return that path.

    Raises:
      JaxdistError: the file cannot be written.
    """
    found = versions()
    line = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{found['cpus']} x {processor()}",
        "jax": found["jax"],
        "figures": [
            {**{key: f[key] for key in KEPT}, "timed": f["unit"] == "s"}
            for f in report.as_json()["figures"]
        ],
    }
    path = directory / f"{report.bench}.jsonl"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise JaxdistError(
            f"the run cannot be recorded in {path}: {error.strerror or error}; give --record a "
            "directory that can be written"
        ) from error
    return path


def processor() -> str:
    """Return the model name of this machine's processor, or "processor" where it is unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "processor"
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else "processor"


def read_runs(path: Path) -> list[JsonObject]:
    """Return the recorded runs of a bench, oldest first.

    Raises:
      JaxdistError: a line is not a recorded run; the message has its number.
    """
    runs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            run = json.loads(line)
            _ = run["date"], run["machine"], [(f["name"], f["ratio"]) for f in run["figures"]]
        except (ValueError, KeyError, TypeError) as error:
            raise JaxdistError(f"{path} line {number} is no recorded run: {error!r}") from error
        runs.append(run)
    return runs


def ranges(runs: Sequence[Mapping[str, Json]]) -> list[Range]:
    """Return the range of each figure, in the order of the newest run.

    >>> run = {"figures": [{"name": "step", "ratio": 1.5, "goal": "<= 2"}]}
    >>> worse = {"figures": [{"name": "step", "ratio": 2.5, "goal": "<= 2"}]}
    >>> (found,) = ranges([run, worse, worse])
    >>> found.median, found.holds
    (2.5, False)
    """
    ratios: dict[str, list[float]] = {}
    newest: dict[str, Mapping[str, Json]] = {}
    # Newest run first, so that `setdefault` keeps the newest figure of each name.
    for run in reversed(runs):
        for figure in run["figures"]:
            if figure["ratio"] is not None:
                ratios.setdefault(figure["name"], []).append(figure["ratio"])
                newest.setdefault(figure["name"], figure)
    return [
        Range(
            name,
            tuple(found),
            newest[name].get("goal") or "",
            newest[name].get("timed", True),
            _shown(newest[name], "ours"),
            _shown(newest[name], "reference"),
        )
        for name, found in ratios.items()
    ]


def _shown(figure: Mapping[str, Any], key: str) -> str:
    value = figure.get(key)
    return "" if value is None else show(value, figure["unit"])


def markdown(directory: Path) -> str:
    """Format all recorded benches as a page.

    Raises:
      JaxdistError: nothing is recorded in the directory.
    """
    paths = sorted(directory.glob("*.jsonl"))
    if not paths:
        raise JaxdistError(f"no run is recorded in {directory}: jaxdist bench NAME --record DIR")
    lines = [
        "# Recorded figures",
        "",
        "Generated by `python -m benchmarks.core.ranges docs/results > docs/results.md`; a run "
        "is added by",
        "`jaxdist bench NAME --record docs/results`. The columns *ours* (jaxdist) and",
        "*reference* have the values of the newest run. Median and range are computed from the "
        "ratios,",
        "ours / reference, of all runs. A goal holds if the median ratio meets the goal.",
        f"Times of fewer than {ENOUGH_RUNS} runs are marked. "
        "[What moves the figures](measurements.md) explains how to read the tables.",
    ]
    for path in paths:
        lines += _section(path.stem, read_runs(path))
    return "\n".join(lines) + "\n"


def _section(bench: str, runs: Sequence[Mapping[str, Json]]) -> list[str]:
    machines = sorted({run["machine"] for run in runs})
    days = sorted({run["date"] for run in runs})
    count = f"{len(runs)} run" + ("s" if len(runs) > 1 else "")
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return [
        "",
        f"## {bench}",
        "",
        f"`jaxdist bench {bench}`, {count} on {when}: {'; '.join(machines)}.",
        "",
        *markdown_table(_COLUMNS, cells(_COLUMNS, ranges(runs))),
    ]


_VERDICTS = {True: "yes", False: "**no**", None: ""}
_COLUMNS: Columns[Range] = {
    "figure": "name",
    "ours": "ours",
    "reference": "reference",
    "median": lambda one: f"{one.median:.3g}",
    "range": lambda one: f"{min(one.ratios):.3g} to {max(one.ratios):.3g}",
    "runs": lambda one: f"{len(one.ratios)}{' (few)' * one.few}",
    "goal": "goal",
    "holds": lambda one: _VERDICTS[one.holds],
}


if __name__ == "__main__":
    print(markdown(Path(sys.argv[1])), end="")
