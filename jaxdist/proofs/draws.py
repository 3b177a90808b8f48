"""The check that random layers draw different numbers in each step, microbatch and batch part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

Batch = Mapping[str, np.ndarray]
"""The arrays of a batch on the host, each `[B, ...]`."""
Loss = Callable[[Batch, int, int], float]
"""A function from (batch, steps, seeds) to the loss in training. `steps` and `seeds` are added to
the number of the step and to the seed."""
STEPS, MICROBATCHES, DEVICES = (
    f"equal random numbers {where}" for where in ("in two steps", "in microbatches", "on devices")
)


def repeated(
    loss: Loss, batch: Batch, *, microbatches: int, devices: int, limit: float
) -> Iterator[str]:
    """Yield those of `STEPS`, `MICROBATCHES` and `DEVICES` that have the same random numbers.

    Two steps draw the same numbers if the loss does not depend on the number of the step, although
    it depends on the seed. The first microbatch and another microbatch draw the same numbers if the
    loss does not change when the two exchange their rows; the same applies to devices.

    Args:
      loss: the loss of a model with random layers.
      batch: the batch on which the loss is computed.
      microbatches: the number of microbatches. Microbatch k has the rows k, k + microbatches, ...
      devices: the number of devices. Each device has successive rows.
      limit: the relative difference that another order of summation explains.
    """
    first = loss(batch, 0, 0)

    def equal(other: float) -> bool:
        return abs(other - first) <= limit * abs(first)

    if equal(loss(batch, 1, 0)):
        if equal(loss(batch, 0, 1)):
            return  # No random number changes the loss.
        yield STEPS
    rows = np.arange(len(next(iter(batch.values()))))
    own_rows = {MICROBATCHES: rows.reshape(-1, microbatches).T, DEVICES: rows.reshape(devices, -1)}
    for name, (first_part, *parts) in own_rows.items():
        # A wrong program may give equal keys to only some parts, for example if it derives keys
        # from `index // 2` or `index % 2`. Therefore each part by itself exchanges its rows with
        # part 0: the loss stays equal if these two parts have equal keys.
        for part in parts:
            order = rows.copy()
            order[first_part], order[part] = part, first_part
            moved = {key: x[order] for key, x in batch.items() if len(x) == len(rows)}
            differs = any(np.any(batch[key] != x) for key, x in moved.items())
            if differs and equal(loss({**batch, **moved}, 0, 0)):
                yield name
                break
