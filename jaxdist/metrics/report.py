"""Reports for other programs: the packages whose versions they have, and the writing of files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from jaxdist.errors import RunError
from jaxdist.types import JsonObject

PACKAGES = ("python", "jax", "jaxlib", "flax", "optax", "numpy", "jaxdist")
"""The packages whose versions `jaxdist.runtime.environment.versions` collects for a report."""


SCHEMA = 1
"""Version of a report's keys; within a version, keys are added, but not removed or redefined."""


def write_json(
    path: str | os.PathLike[str], report: JsonObject, *, what: str, **dumps: object
) -> None:
    """Write plain data as JSON, with the version of its keys.

    Args:
      what: the report's name in the error message.
      dumps: arguments of `json.dumps`.

    Raises:
      RunError: the file cannot be written.
    """
    values = {"schema": SCHEMA, **report}
    text = json.dumps(values, **{"indent": 2, "allow_nan": False, **dumps})
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"cannot write the {what} to {path}: {error.strerror}; choose another file"
        ) from error


def plain(values: Mapping[str, float]) -> JsonObject:
    """Convert numbers to JSON values: NaN and infinities, which JSON lacks, become text.

    >>> plain({"loss": 1.5, "norm": float("inf")})
    {'loss': 1.5, 'norm': 'inf'}
    """
    return {name: v if math.isfinite(v) else str(v) for name, v in values.items()}
