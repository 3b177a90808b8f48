"""A writer of checkpoints that uses no device and never has all arrays in memory at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdist.checkpoint import layout
from jaxdist.checkpoint.manifest import Cuts, FileRecord, LeafRecord, seal
from jaxdist.checkpoint.pieces import CHUNK_BYTES, sharded_cuts, write_rows
from jaxdist.errors import CheckpointError
from jaxdist.types import JsonObject


class Streamed(NamedTuple):
    """An array that is read in parts.

    Attributes:
      name: the path in the state, such as params/norm/scale.
      read: a function from (begin, end) to the rows of that range along the first dim.
      whole: whether to read all rows at once, because one row takes as much time as all rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[int, int], np.ndarray]
    whole: bool


def write_streamed(
    directory: Path, step: int, arrays: Iterable[Streamed], metadata: JsonObject
) -> None:
    """Write a checkpoint array by array, with at most one part of an array in memory.

    Args:
      directory: the directory of the run's checkpoints.
      step: the step of the checkpoint.

    Raises:
      CheckpointError: the directory cannot be written.
    """
    staging = layout.staging_directory(directory, step)
    leaves: dict[str, LeafRecord] = {}
    cuts: dict[str, Cuts] = {}
    files: dict[str, FileRecord] = {}
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        (staging / layout.METADATA).write_text(json.dumps(metadata), encoding="utf-8")
        for index, array in enumerate(arrays):
            name, shape = array.name, array.shape
            leaves[name] = LeafRecord(shape=shape, dtype=str(array.dtype))
            cuts[name] = sharded_cuts(shape, shape, array.dtype.itemsize, CHUNK_BYTES)
            ends = cuts[name][0] if shape and not array.whole else (0, shape[0] if shape else 1)
            parts = (array.read(begin, end) for begin, end in pairwise(ends))
            files |= write_rows(staging, f"{index:06d}", parts, cuts[name])
        seal(staging, step=step, metric=None, leaves=leaves, cuts=cuts, known=files)
        layout.commit(staging, layout.step_directory(directory, step))
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise CheckpointError(
            f"a checkpoint in {directory} cannot be written: {error.strerror or error}; choose a "
            "directory on a disk with room"
        ) from error
