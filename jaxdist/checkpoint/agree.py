"""Agreement between the processes of a run; with one process each of these is the identity.

All of them are collectives: every process calls them, from its main thread, in the same order.
"""

from __future__ import annotations

import json

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdist.types import Json


def broadcast_json(value: Json) -> Json:
    """The value that process 0 passed (JSON types only), on every process."""
    if jax.process_count() == 1:
        return value
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(data.size)))
    padded = np.resize(data, size)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes())


def any_process(flag: bool) -> bool:
    """Whether the flag is set on at least one process."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))
