"""The sizes of the mesh axes of a config."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxdist.types import Json, JsonObject


def mesh_axis_size(mesh: Mapping[str, Json], axis: str) -> int:
    """Return the size of an axis of a section `mesh`, or 1 for an absent axis."""
    size = mesh.get(axis, 1)
    return size if isinstance(size, int) else math.prod(size.values())


def stage_count(config: JsonObject) -> int:
    """Return the number of pipeline stages of a config, or 1 if it has no pipeline."""
    return mesh_axis_size(config["mesh"], "stage")


def data_size(config: JsonObject) -> int:
    """Return the number of devices that share the batch, along the axes data and expert."""
    return math.prod(mesh_axis_size(config["mesh"], axis) for axis in ("data", "expert"))


def axis_sizes(mesh: Mapping[str, Json]) -> dict[str, int]:
    """Return the sizes of the axes data, stage and tensor of a section `mesh`.

    The size of an absent axis is 1.

    >>> axis_sizes({"data": {"dcn": 2, "ici": 3}, "tensor": 2})
    {'data': 6, 'stage': 1, 'tensor': 2}
    """
    return {name: mesh_axis_size(mesh, name) for name in ("data", "stage", "tensor")}
