"""The data of a proof: a config's data, in which examples have unequal weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pydantic import TypeAdapter

from jaxdist.data import DataConfig, Dataset
from jaxdist.parity.draw.foreign import Weighted
from jaxdist.types import Json, JsonObject

_DATA: TypeAdapter[DataConfig] = TypeAdapter(DataConfig)


def weighted(data: Mapping[str, Json]) -> Dataset:
    """Make the data of a section `data`, with a weight for each example by its index."""
    made = _DATA.validate_python(data).build()
    heldout = None if made.heldout is None else Weighted(made.heldout)
    return replace(made, train=Weighted(made.train), heldout=heldout)


def with_weights(data: JsonObject) -> JsonObject:
    """Return a section `data` for the same data, in which examples have unequal weights."""
    return {"type": "import", "path": f"{__name__}:weighted", "args": {"data": data}}
