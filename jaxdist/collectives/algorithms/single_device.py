"""The algorithm for an axis with a single device: nothing is sent."""

from __future__ import annotations

from typing import Literal

import jax

from jaxdist.collectives.axis import Axis, axis_size
from jaxdist.collectives.contract import NOTHING, Algorithm, Combine, Operation, Traffic


class SingleDevice(Algorithm):
    """An algorithm that sends nothing: every operation returns its argument."""

    type: Literal["single_device"] = "single_device"
    """The name that selects this algorithm in a config."""

    def all_reduce(self, flat: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        return flat

    def reduce_scatter(self, blocks: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        return blocks[0]

    def all_gather(self, block: jax.Array, axis: Axis) -> jax.Array:
        return block[None]

    def broadcast(self, flat: jax.Array, axis: Axis, root: int) -> jax.Array:
        return flat

    def reduce(self, flat: jax.Array, axis: Axis, root: int, combine: Combine) -> jax.Array:
        return flat

    def all_to_all(self, blocks: jax.Array, axis: Axis) -> jax.Array:
        return blocks

    def _traffic(self, kind: Operation, payload_bytes: float, size: int) -> Traffic:
        return NOTHING


def unless_single_device(algorithm: Algorithm, axis: Axis) -> Algorithm:
    """Return `algorithm`, or `SingleDevice` if the axis has one device and JAX lacks `algorithm`.

    An algorithm that is not native (`Algorithm.native`) may therefore assume at least two devices.
    A native algorithm is returned for one device too, because jax types its result as replicated.
    """
    single = axis_size(axis) == 1 and not algorithm.native
    return SingleDevice() if single else algorithm
