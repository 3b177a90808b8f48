"""Checks that a run's state and step fit in memory, and errors about exhausted memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jaxdist.errors import RunError, first_line
from jaxdist.hlo.refusal import is_too_large
from jaxdist.jaxprs import equations
from jaxdist.models.remat import HOST_MEMORY
from jaxdist.runtime.hardware import host_memory_bytes
from jaxdist.train.state import TrainState
from jaxdist.train.step import Program
from jaxdist.trees import flatten_with_names
from jaxdist.types import PyTree

REMEDY = (
    "use a smaller train.batch_size, more train.microbatches, shorter or smaller examples, "
    "model.remat: full where the model has it, or more devices"
)


def copied_bytes(program: Program) -> int:
    """Return the bytes of parameters in the host's memory that a step copies, for each device.

    In each microbatch, the forward and the backward pass copy the parameters of scanned layers, and
    the forward pass alone copies all other parameters. The update copies trained parameters to the
    device and back.
    """
    model, copied = program.model, 0
    for name, leaf in flatten_with_names(program.state_shapes.params):
        passes = program.compute.microbatches * (1 + (name in model.scanned))
        copies = passes + 2 * (name not in model.frozen)
        copied += copies * bytes_per_device(leaf, host=True)
    return copied


def bytes_per_device(shapes: PyTree, *, host: bool = False) -> int:
    """Return the bytes that a tree of shapes with shardings takes on each device.

    Args:
      host: whether to count only the leaves in the host's memory. If false, only the leaves in the
        devices' memory are counted.
    """
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
        if (leaf.sharding.memory_kind == HOST_MEMORY) is host
    )


def device_memory_bytes(device: Any, local_devices: int) -> int | None:
    """Return a device's memory in bytes, or None if it is unknown.

    Fake CPU devices share the memory of the host in equal parts.
    """
    if device.platform == "cpu":
        return host_memory_bytes() // local_devices
    statistics = device.memory_stats() or {}
    return statistics.get("bytes_limit")


def _local_device() -> tuple[Any, int | None]:
    """Return a device of this process, and its memory in bytes or None."""
    devices = jax.local_devices()
    return devices[0], device_memory_bytes(devices[0], len(devices))


def check_state_fits(state: TrainState) -> None:
    """Check that the shards of a state fit in a device's memory.

    Args:
      state: the state as `jax.ShapeDtypeStruct`s with shardings.

    Raises:
      RunError: the state alone, without gradients and activations, exceeds the device's memory. The
        message lists the sizes of the state's parts.
    """
    device, limit = _local_device()
    needed = bytes_per_device(state)
    if limit is None or needed <= limit:
        return
    parts = ", ".join(
        f"{name} {bytes_per_device(part) / 1e9:,.1f} GB"
        for name, part in (
            ("parameters", state.params),
            ("optimizer", state.opt_state),
            ("strategy", state.outer),
        )
        if jax.tree.leaves(part)
    )
    raise RunError(
        f"the training state needs {needed / 1e9:,.1f} GB on each device ({parts}), but "
        f"a {device.device_kind} has {limit / 1e9:,.1f} GB. Use a smaller model, or "
        "split it over more devices: parallel.zero.stage 1 to 3 along mesh axis data, or mesh "
        "axis tensor"
    )


def check_step_fits(program: Program) -> None:
    """Check that the largest matrix product of a step fits in the memory of all devices together.

    The check only traces the step, which takes much less time than a failing compilation.

    Raises:
      RunError: a result (such as attention scores, or logits) exceeds the memory.
    """
    devices, (device, limit) = program.layout.mesh.devices, _local_device()
    traced = program.train.trace(program.state_shapes, program.batch)
    largest = max(_products(traced.jaxpr), key=_size_bytes, default=None)
    if limit is None or largest is None or _size_bytes(largest) <= limit * devices.size:
        return
    raise RunError(
        f"a step makes an array {list(largest.shape)} of {largest.dtype}, "
        f"{_size_bytes(largest) / 1e9:,.1f} GB, but {devices.size} x "
        f"{device.device_kind} have {limit * devices.size / 1e9:,.1f} GB: {REMEDY}"
    )


def _products(jaxpr: Any) -> Iterator[Any]:
    """Yield the abstract result of each matrix product, which must be written to memory."""
    for equation in equations(jaxpr):
        if equation.primitive.name == "dot_general":
            left = equation.invars[0].aval.shape
            (contracted, _), _ = equation.params["dimension_numbers"]
            # A product over a single element may be a broadcast, which is not written to memory.
            if math.prod(left[dim] for dim in contracted) > 1:
                yield equation.outvars[0].aval


def _size_bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


@contextmanager
def told_if_too_large(what: str) -> Iterator[None]:
    """Convert an error about exhausted device memory in the block to a RunError.

    Args:
      what: the subject of the message, such as a step of 8 examples.

    Raises:
      RunError: the devices' memory was exhausted in the block.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_too_large(str(error)):
            raise
        reason = first_line(error)
        raise RunError(f"{what} does not fit the memory ({reason}): {REMEDY}") from error
