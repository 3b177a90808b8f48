"""Figures, which are compared with their goals, and the report of a bench."""

from __future__ import annotations

import math
import operator
import os
import platform
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Generic, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks.core.harness import Sample, paired_ratio
from jaxdist.columns import Value, cells, table
from jaxdist.errors import JaxdistError
from jaxdist.metrics.report import PACKAGES, write_json
from jaxdist.runtime import environment
from jaxdist.types import Json, JsonObject

T = TypeVar("T")
_EXTRAS = {"torch": "bench", "libtpu": "tpu"}
_COMPARISONS = {"<=": operator.le, ">=": operator.ge}
_GOAL = re.compile(r"(<=|>=)\s*(\d+(?:\.\d+)?)")


def holds(goal: str, ratio: float) -> bool | None:
    """Return whether a ratio meets a goal such as "<= 1.03", or None without a goal.

    A ratio of NaN meets no goal.
    """
    found = _GOAL.fullmatch(goal)
    if found is None:
        return None
    sign, limit = found.groups()
    return bool(_COMPARISONS[sign](ratio, float(limit)))


def lacking(package: str) -> str:
    """Return why a package cannot be used here, or empty if it is installed."""
    if find_spec(package) is not None:
        return ""
    return f"{package} is not installed: pip install 'jaxdist[{_EXTRAS[package]}]'"


def apart(one: float, other: float) -> float:
    """Return the ratio of the larger number to the smaller: 1 if equal, infinite if one is 0.

    >>> apart(2.0, 4.0), apart(0.0, 0.0), apart(0.0, 1.0)
    (2.0, 1.0, inf)
    """
    low, high = sorted((one, other))
    return 1.0 if low == high else high / low if low > 0 else math.inf


@dataclass(frozen=True)
class Figure:
    """A number that was measured, with its reference.

    Attributes:
      name: the name of the measured quantity.
      ours, reference: the number and its reference, both in `unit`.
      goal: "<= x" or ">= x", a condition on the ratio, or empty if the figure is only shown.
      unit: for example "s" or "bytes"; seconds are shown in a readable scale.
      note: the conditions that a reader must know to trust the number.
      ours_iqr, reference_iqr: the spreads of `ours` and `reference`, in `unit`, or None for counts.
      paired_ratio: the median of the ratios of pairs, which replaces ours / reference as the ratio,
        or None.

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
        cls,
        name: str,
        ours: Sample,
        reference: Sample,
        goal: str = "",
        note: str = "",
        unit: str = "s",
    ) -> Figure:
        """Return the figure of two samples of `interleave` or `alternate_processes`."""
        medians, spreads = (ours.median, reference.median), (ours.iqr, reference.iqr)
        return cls(name, *medians, goal, unit, note, *spreads, paired_ratio(ours, reference))

    @classmethod
    def skipped(cls, name: str, reason: str) -> Figure:
        """Return a figure that cannot be measured here, with the reason as its note."""
        return cls(name, math.nan, math.nan, unit="", note=f"skipped: {reason}")

    @classmethod
    def worst(
        cls,
        name: str,
        cases: Collection[T],
        pair: Callable[[T], tuple[float, float]],
        goal: str,
        unit: str,
        note: Callable[[T], str],
        *,
        either: bool = False,
    ) -> Figure:
        """Return the figure of the case whose ratio is the largest.

        Args:
          pair: a function from a case to its number and its reference.
          note: a function from the case with the largest ratio to the note.
          either: whether a ratio below 1 counts as its inverse.
        """

        def off(case: T) -> float:
            ours, reference = pair(case)
            if either:
                return apart(ours, reference)
            return ours / reference if reference else math.inf

        case = max(cases, key=off)
        paired = off(case) if either else None
        return cls(name, *pair(case), goal, unit, note(case), paired_ratio=paired)

    @property
    def ratio(self) -> float:
        """The ratio of ours to the reference; NaN where the reference is 0."""
        if self.paired_ratio is not None:
            return self.paired_ratio
        return self.ours / self.reference if self.reference else math.nan

    @property
    def holds(self) -> bool | None:
        """Whether the ratio meets the goal, or None without a goal. NaN meets no goal."""
        return holds(self.goal, self.ratio)

    def as_json(self) -> JsonObject:
        """Return plain data for the report; numbers that are not finite become null."""
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
    """A table of plain values without a goal.

    Attributes:
      title: the text above the rows.
      columns: the unit of each column by its name ("" for none); seconds are shown in a readable
        scale.
      rows: for each row, a value for each column, or None.

    >>> Listing("sizes", {"size": "bytes", "time": "s"}, [(4096, 0.001)]).as_json()["rows"]
    [{'size': 4096, 'time': 0.001}]
    """

    title: str
    columns: Mapping[str, str]
    rows: Sequence[Sequence[Json]]

    def as_json(self) -> JsonObject:
        """Return plain data: the title, the units, and a mapping for each row."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "units": dict(self.columns), "rows": rows}

    def table(self) -> Table:
        """Return the rows as a table, with numbers aligned to the right."""
        texts = [
            index
            for index in range(len(self.columns))
            if not all(isinstance(row[index], int | float | None) for row in self.rows)
        ]
        made = table(self.title, *self.columns, left=texts)
        for row in self.rows:
            values = zip(row, self.columns.values(), strict=True)
            made.add_row(*(_cell(value, unit) for value, unit in values))
        return made


@dataclass(frozen=True)
class Sheet(Generic[T]):
    """The columns of a listing of one kind of record; a call with records returns a `Listing`.

    Attributes:
      title: the text above the rows, or a function from the records to this text.
      columns: for each column, the name of an attribute of the records or a function of a record.
        For a column with a unit, a pair of this name or function and the unit.

    >>> sheet = Sheet("sizes", {"real": ("real", "bytes"), "twice": lambda one: 2 * one.real})
    >>> sheet([3.0]).rows
    [(3.0, 6.0)]
    """

    title: str | Callable[[Sequence[T]], str]
    columns: Mapping[str, Value[T] | tuple[Value[T], str]]

    def __call__(self, records: Sequence[T]) -> Listing:
        title = self.title if isinstance(self.title, str) else self.title(records)
        pairs = {k: v if isinstance(v, tuple) else (v, "") for k, v in self.columns.items()}
        values = {name: value for name, (value, _) in pairs.items()}
        units = {name: unit for name, (_, unit) in pairs.items()}
        return Listing(title, units, cells(values, records))


def _cell(value: Json, unit: str) -> str:
    if value is None:
        return ""
    return show(value, unit) if isinstance(value, int | float) else str(value)


@dataclass(frozen=True)
class Report:
    """The figures of one bench, with the versions of the software that they were measured on."""

    bench: str
    figures: Sequence[Figure]
    listings: Sequence[Listing] = ()

    def as_json(self) -> JsonObject:
        """Return plain data: `bench`, `versions`, `figures`, and `listings` if there are any."""
        figures = [figure.as_json() for figure in self.figures]
        report = {"bench": self.bench, "versions": versions(), "figures": figures}
        if self.listings:
            report["listings"] = [listing.as_json() for listing in self.listings]
        return report

    def write_json(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON.

        Raises:
          RunError: the file cannot be written.
        """
        write_json(path, self.as_json(), what=f"report of bench {self.bench!r}")

    def table(self) -> Table:
        """Return the figures as a table that fits 80 columns."""
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
    """Return the versions, platform, devices and CPUs; this starts the jax backend."""
    import jax

    devices = jax.devices()
    return {
        **environment.versions(PACKAGES),
        "platform": platform.platform(),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "cpus": os.cpu_count(),
    }


def show(value: float, unit: str) -> str:
    """Format a value with its unit; "s" and "B" are shown in a readable scale.

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
