"""The contents that all reports for other programs share: package versions and the file's form."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from jaxdist.errors import RunError, os_errors_as
from jaxdist.types import JsonObject

PACKAGES = ("python", "jax", "jaxlib", "flax", "optax", "numpy", "jaxdist")
"""The packages whose versions `jaxdist.runtime.environment.versions` collects for a report."""


SCHEMA = 1
"""The version of the keys of reports. Within a version, keys may be added, but not removed or
redefined.
"""


def write_json(
    path: str | os.PathLike[str] | None,
    report: JsonObject,
    *,
    what: str,
    remedy: str = "choose another file",
    **dumps: object,
) -> None:
    """Write plain data as JSON, together with the version of its keys.

    Args:
      path: the file, or None to write nothing.
      report: the data, whose numbers must be finite, except with `allow_nan=True`.
      what: the name of the report in the error message.
      remedy: the advice in the error message.
      dumps: the keyword arguments that are passed to `json.dumps`.

    Raises:
      RunError: the file cannot be written.
    """
    if path is None:
        return
    values = {"schema": SCHEMA, **report}
    text = json.dumps(values, **{"indent": 2, "allow_nan": False, **dumps})
    with os_errors_as(RunError, f"cannot write the {what} to {path}", remedy):
        Path(path).write_text(text + "\n", encoding="utf-8")


def plain(values: Mapping[str, float]) -> JsonObject:
    """Return numbers as JSON values; NaN and infinities, which JSON lacks, become text.

    >>> plain({"loss": 1.5, "norm": float("inf")})
    {'loss': 1.5, 'norm': 'inf'}
    """
    return {name: v if math.isfinite(v) else str(v) for name, v in values.items()}
