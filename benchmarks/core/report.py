"""Figures, judged against their goals, and the report of a bench."""

from __future__ import annotations

import math
import operator
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.core.harness import Sample, paired_ratio
from jaxdist.errors import JaxdistError
from jaxdist.metrics.report import PACKAGES, write_json
from jaxdist.runtime import environment
from jaxdist.types import Json, JsonObject

_COMPARISONS = {"<=": operator.le, ">=": operator.ge}
_GOAL = re.compile(r"(<=|>=)\s*(\d+(?:\.\d+)?)")


def holds(goal: str, ratio: float) -> bool | None:
    """Whether a ratio meets a goal such as "<= 1.03"; None without a goal. NaN meets none."""
    found = _GOAL.fullmatch(goal)
    if found is None:
        return None
    sign, limit = found.groups()
    return bool(_COMPARISONS[sign](ratio, float(limit)))


@dataclass(frozen=True)
class Figure:
    """One number of ours beside its reference.

    Attributes:
      name: what is measured.
      ours, reference: both in `unit`.
      goal: "<= x" or ">= x", held against the ratio; empty when the figure is only shown.
      unit: for example "s" or "bytes"; seconds are shown in a readable scale.
      note: what a reader must know to trust the number.
      ours_iqr, reference_iqr: spread of the two, in `unit`; None for a count.
      paired_ratio: median of the ratios of pairs, taken as the ratio when given.

    Raises:
      JaxdistError: a goal that cannot be read.

    >>> figure = Figure("step time", ours=1.02, reference=1.0, goal="<= 1.03", unit="s")
    >>> figure.ratio, figure.holds
    (1.02, True)
    """

    name: str
    ours: float
    reference: float
    goal: str = ""
    unit: str = "s"
    note: str = ""
    ours_iqr: float | None = None
    reference_iqr: float | None = None
    paired_ratio: float | None = None

    def __post_init__(self) -> None:
        if self.goal and not _GOAL.fullmatch(self.goal):
            raise JaxdistError(
                f"figure {self.name!r}: goal {self.goal!r} cannot be read; write '<= 1.03', "
                "'>= 2', or nothing for a figure that is only shown"
            )

    @classmethod
    def compare(
        cls, name: str, ours: Sample, reference: Sample, goal: str = "", note: str = ""
    ) -> Figure:
        """The figure of two samples of `interleave` or `alternate_processes`."""
        return cls(
            name,
            ours.median,
            reference.median,
            goal,
            "s",
            note,
            ours.iqr,
            reference.iqr,
            paired_ratio(ours, reference),
        )

    @property
    def ratio(self) -> float:
        """Ours over the reference; NaN where the reference is 0."""
        if self.paired_ratio is not None:
            return self.paired_ratio
        return self.ours / self.reference if self.reference else math.nan

    @property
    def holds(self) -> bool | None:
        """Whether the ratio meets the goal; None without a goal. NaN meets none."""
        return holds(self.goal, self.ratio)

    def as_json(self) -> JsonObject:
        """Plain data for the report; numbers that are not finite become null."""
        numbers = {
            "ours": self.ours,
            "reference": self.reference,
            "ratio": self.ratio,
            "ours_iqr": self.ours_iqr,
            "reference_iqr": self.reference_iqr,
        }
        finite = {k: v if v is not None and math.isfinite(v) else None for k, v in numbers.items()}
        texts = {"goal": self.goal or None, "unit": self.unit, "note": self.note}
        return {"name": self.name, **finite, **texts, "holds": self.holds}


@dataclass(frozen=True)
class Listing:
    """A table of plain values that belongs to no single goal.

    Attributes:
      title: what the rows are.
      columns: name to unit ("" for none); seconds are shown in a readable scale.
      rows: one value for each column; None where there is none.

    >>> Listing("sizes", {"size": "bytes", "time": "s"}, [(4096, 0.001)]).as_json()["rows"]
    [{'size': 4096, 'time': 0.001}]
    """

    title: str
    columns: Mapping[str, str]
    rows: Sequence[Sequence[Json]]

    def as_json(self) -> JsonObject:
        """Plain data: the title, the units, and one mapping a row."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "units": dict(self.columns), "rows": rows}

    def table(self) -> Table:
        """The rows as a table; numbers to the right."""
        table = Table(title=self.title, title_justify="left", show_edge=False)
        for index, name in enumerate(self.columns):
            number = all(isinstance(row[index], int | float | None) for row in self.rows)
            table.add_column(name, justify="right" if number else "left", overflow="fold")
        for row in self.rows:
            cells = zip(row, self.columns.values(), strict=True)
            table.add_row(*(_cell(value, unit) for value, unit in cells))
        return table


def _cell(value: Json, unit: str) -> str:
    if value is None:
        return ""
    return show(value, unit) if isinstance(value, int | float) else str(value)


@dataclass(frozen=True)
class Report:
    """The figures of one bench, with the versions they were measured on."""

    bench: str
    figures: Sequence[Figure]
    listings: Sequence[Listing] = ()

    def as_json(self) -> JsonObject:
        """Plain data: `bench`, `versions` and `figures`; `listings` where there are any."""
        figures = [figure.as_json() for figure in self.figures]
        report = {"bench": self.bench, "versions": versions(), "figures": figures}
        if self.listings:
            report["listings"] = [listing.as_json() for listing in self.listings]
        return report

    def write_json(self, path: str | os.PathLike[str]) -> None:
        """Write `as_json`.

        Raises:
          RunError: the file cannot be written.
        """
        write_json(path, self.as_json(), what=f"report of bench {self.bench!r}")

    def table(self) -> Table:
        """The figures as a table that fits 80 columns."""
        table = Table(title=f"bench {self.bench}", title_justify="left", show_edge=False)
        table.add_column("figure", overflow="fold")
        for name in ("ours", "reference", "ratio", "goal"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("holds", no_wrap=True)
        verdicts = {True: "[green]yes[/]", False: "[bold red]no[/]", None: ""}
        for figure in self.figures:
            ours, reference = (show(v, figure.unit) for v in (figure.ours, figure.reference))
            ratio = f"{figure.ratio:.3f}" if math.isfinite(figure.ratio) else ""
            verdict = verdicts[figure.holds]
            table.add_row(figure.name, ours, reference, ratio, figure.goal, verdict)
        return table

    def print(self, console: Console | None = None) -> None:
        """Print the table, and the notes below it."""
        console = Console() if console is None else console
        console.print(self.table())
        for figure in self.figures:
            if figure.note:
                console.print(f"{figure.name}: {figure.note}", markup=False, highlight=False)
        for listing in self.listings:
            console.print()
            console.print(listing.table())


def versions() -> JsonObject:
    """What the figures were measured on; starts the jax backend."""
    import jax

    devices = jax.devices()
    return {
        **environment.versions(PACKAGES),
        "platform": platform.platform(),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "cpus": os.cpu_count(),
    }


def show(value: float, unit: str) -> str:
    """A value with its unit, seconds and B in a readable scale.

    >>> show(0.0381, "s"), show(2.5, "s"), show(4.2e-5, "s"), show(1048576, "bytes")
    ('38.1 ms', '2.5 s', '42 us', '1.049e+06 bytes')
    >>> show(4096, "B"), show(64 * 2**20, "B")
    ('4 KiB', '64 MiB')
    """
    if unit == "s" and value:
        for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
            if abs(value) >= scale:
                return f"{value / scale:.3g} {name}"
    if unit == "B":
        for scale, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if abs(value) >= scale:
                return f"{value / scale:.4g} {name}"
    return f"{value:.4g} {unit}".rstrip()
