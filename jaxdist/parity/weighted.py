"""Datasets whose examples have unequal weights, to compare sums with weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from pydantic import TypeAdapter

from jaxdist.data import DataConfig
from jaxdist.data.permutation import mix
from jaxdist.data.source import Dataset, Example, Source, take, take_one
from jaxdist.types import Json, JsonObject

WEIGHTS = np.array([0, 0, 0, 0.5, 1, 1, 2, 3], np.float32)
"""The weights of examples. A hash of the example's index selects its weight."""


@dataclass(frozen=True)
class Weighted:
    """A source that adds a weight to each example of another source.

    About three examples of eight have weight 0.
    """

    source: Source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Example:
        return take_one(self, index)

    def take(self, indices: np.ndarray) -> Example:
        """Return the N examples at `indices`, with their weights, float32 `[N]`, as "weight"."""
        weights = WEIGHTS[mix(indices.astype(np.uint64)) % len(WEIGHTS)]
        return {**take(self.source, indices), "weight": weights}


def weighted_dataset(**data: Json) -> Dataset:
    """Return the dataset of a section `data`, with a weight that depends on an example's index."""
    made = TypeAdapter[DataConfig](DataConfig).validate_python(data).build()
    heldout = None if made.heldout is None else Weighted(made.heldout)
    return replace(made, train=Weighted(made.train), heldout=heldout)


def with_weights(data: JsonObject) -> JsonObject:
    """Return a section `data` for the same examples with unequal weights.

    The settings of the original section become the `args` of the result.
    """
    path = f"{__name__}:{weighted_dataset.__name__}"
    return {"type": "import", "path": path, "args": data}
