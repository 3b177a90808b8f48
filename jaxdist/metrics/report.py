"""Reports for other programs: their package versions, and writing the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

from jaxdist.errors import RunError
from jaxdist.types import Json

PACKAGES = ("python", "jax", "jaxlib", "flax", "optax", "numpy", "jaxdist")
"""Packages for `jaxdist.runtime.environment.versions`."""


def write_json(path: str | os.PathLike[str], report: Json, *, what: str, **dumps: object) -> None:
    """Write plain data; `what` is its name in the message, `dumps` are arguments of `json.dumps`.

    Raises:
      RunError: the file cannot be written.
    """
    text = json.dumps(report, **{"indent": 2, "allow_nan": False, **dumps})
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"cannot write the {what} to {path}: {error.strerror}; choose another file"
        ) from error
