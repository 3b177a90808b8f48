"""The payload of masked pushes, and the mean of their sum, as functions that need no connection."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxdist.param_server.consistency.contract import Arrival, Merge
from jaxdist.secure.masks import decode, encode
from jaxdist.wire.contract import Spec

WORD_BYTES = 8


def masked_spec(shard: Spec) -> Spec:
    """Return the specification of a masked push, in which each element is an integer of 8 bytes."""
    return Spec(shard.tensor, np.dtype(np.uint8), WORD_BYTES * shard.length)


def fixed_point_mean(
    merge: Merge, change_of: Callable[[Arrival], np.ndarray], *, clients: int
) -> np.ndarray:
    """Return the mean of changes as secure aggregation computes it, from the plain changes.

    Args:
      clients: the number of clients for which the run is planned.
    """
    changes = [(change_of(part.arrival), part.arrival.tokens) for part in merge.parts]
    total = sum((encode(x, clients, tokens) for x, tokens in changes), start=np.uint64(0))
    return mean_of_sum(merge, np.asarray(total)).astype(changes[0][0].dtype)


def mean_of_sum(merge: Merge, total: np.ndarray) -> np.ndarray:
    """Return the mean, weighted by tokens, of changes whose encodings have the sum `total`."""
    return decode(total) / sum(part.arrival.tokens for part in merge.parts)
