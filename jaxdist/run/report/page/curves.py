"""The curves of a run, which are read from metrics of any length and thinned for a page."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxdist.metrics.curve import smooth, thin
from jaxdist.metrics.energy.tally import SPLIT as ENERGY
from jaxdist.metrics.goodput import INTERVALS
from jaxdist.metrics.goodput import SPLIT as GOODPUT
from jaxdist.run.report.page.loads import PREFIX, ExpertLoads
from jaxdist.types import Json, JsonObject

_NOT_CURVES = (GOODPUT, ENERGY, INTERVALS)
"""The splits that are not drawn as curves, since they have times, energies and save intervals."""
_KEYS = frozenset(("step", "split", "time"))
_DIGITS = 7
"""The number of significant digits of a curve's values, which is the precision of float32."""


@dataclass
class Curve:
    """The steps and values of one metric in one split."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def as_json(self, most: int, *, smoothed: bool) -> JsonObject:
        """Return at most `most` points of the metric and, if `smoothed`, of its moving mean.

        A metric of up to 60 records has no moving mean. The result also has the first and the last
        value, the number of records, and the number of values that are not finite.
        """
        steps = np.frombuffer(self.steps, np.int64)
        values = np.frombuffer(self.values, np.float64)
        finite = np.isfinite(values)
        found: JsonObject = {"broken": int((~finite).sum()), "records": len(steps)}
        found["first"], found["last"] = (
            [int(steps[at]), values[at] if finite[at] else str(values[at])] for at in (0, -1)
        )
        steps, values = steps[finite], values[finite]
        found["points"] = _points(*thin(steps, values, most))
        if smoothed and len(steps) > 60:
            every = -(-len(steps) // most)
            mean = smooth(values, len(steps) // 60)
            found["smooth"] = _points(steps[::every], mean[::every])
        return found


@dataclass
class RunRecords:
    """The records of a run: the metrics as curves, and the other records unchanged.

    Attributes:
      curves: the curves by split and metric.
      loads: the loads of experts, of which there are too many for curves.
      others: the records of time, energy and save intervals.
      last_time: the time of the last record of a metric, in seconds since 1970, or None before the
        first record.
    """

    curves: dict[tuple[str, str], Curve] = field(default_factory=lambda: defaultdict(Curve))
    others: list[JsonObject] = field(default_factory=list)
    loads: ExpertLoads = field(default_factory=ExpertLoads)
    last_step: int = 0
    last_time: float | None = None


def collect(records: Iterable[Mapping[str, Json]]) -> RunRecords:
    """Sort records into curves and other records, one at a time, without storing all records."""
    found = RunRecords()
    for record in records:
        split, step = record["split"], record["step"]
        found.last_step = max(found.last_step, step)
        if split in _NOT_CURVES:
            found.others.append(dict(record))
            continue
        found.loads.add(split, record)
        for name, value in record.items():
            if name in _KEYS or name.startswith(PREFIX):
                continue
            if isinstance(value, int | float):
                curve = found.curves[split, name]
                curve.steps.append(step)
                curve.values.append(value)
        found.last_time = record.get("time", found.last_time)
    return found


def _points(steps: np.ndarray, values: np.ndarray) -> list[Json]:
    return [steps.tolist(), [_rounded(value) for value in values.tolist()]]


def _rounded(value: float) -> float:
    """Round a value to the number of digits that the page shows.

    >>> _rounded(0.123456789), _rounded(3.0)
    (0.1234568, 3)
    """
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() and math.fabs(short) < 1e15 else short
