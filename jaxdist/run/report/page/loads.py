"""The loads of experts by layer and step, thinned to a picture."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxdist.types import Json, JsonObject

PREFIX = "expert_load/"
"""The prefix of a metric's name, before the numbers of the layer and of the expert."""
MOST_STEPS = 120
"""The largest number of columns of a picture; each column is a step or a group of steps."""
_MOST_PERCENT = 999


@dataclass
class SplitLoads:
    """The load of each expert at each step of one split."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: dict[tuple[int, int], array[float]] = field(
        default_factory=lambda: defaultdict(lambda: array("d"))
    )

    def as_json(self, cells: int) -> JsonObject:
        """Return the loads in percent of the mean load of the layer, with about `cells` numbers.

        If there are more steps than columns, each column is the mean of neighboring steps.
        """
        layers, experts = (1 + max(key[at] for key in self.values) for at in (0, 1))
        count = len(self.steps)
        load_NES = np.zeros((layers, experts, count))
        for (layer, expert), values in self.values.items():
            load_NES[layer, expert, : len(values)] = np.frombuffer(values)
        load_NES = np.nan_to_num(load_NES, nan=0.0, posinf=0.0, neginf=0.0)
        columns = max(1, min(count, MOST_STEPS, cells // (layers * experts)))
        groups = np.array_split(np.arange(count), columns)
        mean_CNE = np.stack([load_NES[..., own].mean(-1) for own in groups])
        whole_CN1 = mean_CNE.mean(-1, keepdims=True)
        ratio_CNE = mean_CNE / np.where(whole_CN1 == 0, 1, whole_CN1)
        percent_NEC = np.moveaxis(np.rint(100 * ratio_CNE).clip(0, _MOST_PERCENT), 0, -1)
        return {
            "steps": [int(self.steps[own[-1]]) for own in groups],
            "percent": percent_NEC.astype(int).tolist(),
        }


@dataclass
class ExpertLoads:
    """The loads of experts in each split of a run."""

    splits: dict[str, SplitLoads] = field(default_factory=lambda: defaultdict(SplitLoads))

    def add(self, split: str, record: Mapping[str, Json]) -> None:
        """Add the loads of experts in a record, if the record has them."""
        found = {name: value for name, value in record.items() if name.startswith(PREFIX)}
        if not found:
            return
        own = self.splits[split]
        own.steps.append(record["step"])
        for name, value in found.items():
            layer, expert = map(int, name.removeprefix(PREFIX).split("/"))
            own.values[layer, expert].append(float(value))

    def as_json(self, cells: int) -> list[Json]:
        """Return the picture of each split, with about `cells` numbers in all pictures together."""
        each = cells // max(1, len(self.splits))
        return [{"split": split, **own.as_json(each)} for split, own in self.splits.items()]
