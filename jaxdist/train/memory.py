"""Whether the training state fits, asked before anything is allocated."""

from __future__ import annotations

import math
import os
from typing import Any

import jax

from jaxdist.errors import RunError
from jaxdist.train.state import TrainState


def bytes_per_device(shapes: Any) -> int:
    """Bytes that each device holds of a tree of `jax.ShapeDtypeStruct` with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
    )


def device_memory_bytes(device: Any, local_devices: int) -> int | None:
    """Memory of one device; fake CPU devices share the host's. None when it is not known."""
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local_devices
    statistics = device.memory_stats() or {}
    return statistics.get("bytes_limit")


def check_state_fits(state: TrainState) -> None:
    """Refuse a state that no device could hold, with the sizes of its parts.

    Args:
      state: `jax.ShapeDtypeStruct`s with shardings.

    Raises:
      RunError: the state alone (without gradients and activations) exceeds the device's memory.
    """
    devices = jax.local_devices()
    limit = device_memory_bytes(devices[0], len(devices))
    needed = bytes_per_device(state)
    if limit is None or needed <= limit:
        return
    parts = ", ".join(
        f"{name} {bytes_per_device(part) / 1e9:,.1f} GB"
        for name, part in (("parameters", state.params), ("optimizer", state.opt_state))
    )
    raise RunError(
        f"the training state needs {needed / 1e9:,.1f} GB on each device ({parts}), but a "
        f"{devices[0].device_kind} has {limit / 1e9:,.1f} GB: use a smaller model, or split it "
        "over more devices: parallel.zero.stage 1 to 3 along mesh axis data, or mesh axis tensor"
    )
