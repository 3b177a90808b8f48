"""Functions by which all processes of a run agree on a value that some processes have.

All functions are collectives: every process calls them on its main thread, in the same order. A run
with a single process communicates nothing.
"""

from __future__ import annotations

import json

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdist.types import Json


def broadcast_json(value: Json) -> Json:
    """Return, in every process, the value that process 0 passed.

    Args:
      value: a value of JSON types; only the value of process 0 counts.
    """
    return gather_json(value)[0]


def broadcast_int(value: int) -> int:
    """Return, in every process, the integer below 2**31 that process 0 passed.

    Unlike `broadcast_json`, whose arrays vary in length, this function compiles a single program.
    """
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def gather_json(value: Json) -> list[Json]:
    """Return the values that all processes passed, in the order of the processes.

    Args:
      value: this process's value, of JSON types.

    >>> gather_json("a host")
    ['a host']
    """
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(data.size))).tolist()
    # All processes must pass arrays of the same shape; the padding is removed below.
    padded = np.resize(data, max(sizes))
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def any_process(flag: bool) -> bool:
    """Return, in every process, whether the flag is set in at least one process."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))
