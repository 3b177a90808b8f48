"""The sections of a drawn config: the sizes of its mesh axes, and changes of its values."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxdist.types import Json, JsonObject

Sections = JsonObject


def mesh_axis_size(mesh: Mapping[str, Json], axis: str) -> int:
    """Return the size of an axis of a section `mesh`, or 1 for an absent axis."""
    size = mesh.get(axis, 1)
    return size if isinstance(size, int) else math.prod(size.values())


def stage_count(config: Sections) -> int:
    """Return the number of pipeline stages of a config, or 1 if it has no pipeline."""
    return mesh_axis_size(config["mesh"], "stage")


def data_size(config: Sections) -> int:
    """Return the number of devices that share the batch, along the axes data and expert.

    >>> data_size({"mesh": {"data": {"dcn": 2, "ici": 3}, "tensor": 2}})
    6
    """
    return math.prod(mesh_axis_size(config["mesh"], axis) for axis in ("data", "expert"))


def with_values(config: Sections, section: str, **values: Json) -> Sections:
    """Return a mapping from a section's name to the section with the given values added.

    Args:
      config: the sections of the config.
      section: the name of the section.
      values: the values to set in the section.
    """
    return {section: {**config.get(section, {}), **values}}


def data_settings(config: Sections) -> Sections:
    """Return the settings of a config's data, without the unequal weights of some draws."""
    return config["data"].get("args", config["data"])


def with_data(config: Sections, **values: Json) -> Sections:
    """Return a mapping from "data" to the section with the given values added.

    Args:
      config: the sections of the config.
      values: the values to set in the result of `data_settings`.
    """
    if "args" not in config["data"]:
        return with_values(config, "data", **values)
    return with_values(config, "data", args={**config["data"]["args"], **values})
