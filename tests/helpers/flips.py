"""A simulated memory fault: a flipped bit in one device's replica of an array."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import jax
import numpy as np

from jaxdist.run import job
from jaxdist.run.hooks.loop import LoopHook, Moment


def bits_of(leaf: jax.Array) -> int:
    """Return the number of bits in a device's shard that can be flipped; a bool has one bit."""
    shard = leaf.addressable_shards[0].data
    return shard.size * (1 if leaf.dtype == np.bool_ else 8 * leaf.dtype.itemsize)


def with_bit_flipped(leaf: jax.Array, bit: int, device: jax.Device) -> jax.Array:
    """Return a copy of an array in which bit number `bit` of the shard on `device` is flipped.

    If `device` belongs to another process, the array is returned unchanged.
    """
    # The shards are copied, because XLA:CPU may return its own memory, which must not change.
    parts = {shard.device: np.array(shard.data) for shard in leaf.addressable_shards}
    if device not in parts:
        return leaf
    octets = parts[device].reshape(-1).view(np.uint8)
    place = (bit, 0) if leaf.dtype == np.bool_ else divmod(bit, 8)
    octets[place[0]] ^= np.uint8(1 << place[1])
    arrays = [jax.device_put(part, holder) for holder, part in parts.items()]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)


@dataclass
class Flip(LoopHook):
    """A hook that flips a bit of one device's replica of a parameter, after all other hooks.

    Attributes:
      steps: the steps after which a bit is flipped; each step counts once, even if it is repeated.
      bit: the number of the flipped bit in the shard.
      at_device: the number of the device.
      leaf: the index of the parameter.
      flipped: the number of bits that were flipped so far.
    """

    steps: list[int]
    bit: int = 3
    at_device: int = 5
    leaf: int = -1
    flipped: int = 0

    def due(self, step: int) -> bool:
        return step in self.steps

    def at(self, moment: Moment) -> None:
        if moment.step not in self.steps or moment.stop:
            return
        self.steps.remove(moment.step)
        self.flipped += 1
        leaves, structure = jax.tree.flatten(moment.state.params)
        device = jax.devices()[self.at_device]
        leaves[self.leaf] = with_bit_flipped(leaves[self.leaf], self.bit, device)
        moment.state = replace(moment.state, params=jax.tree.unflatten(structure, leaves))


@contextmanager
def flipping(flip: Flip) -> Iterator[Flip]:
    """Within the block, add a `Flip` to the hooks of each `jaxdist train` in this process."""
    plain = job.hooks_of

    def hooks(*given: Any) -> Any:
        return [*plain(*given), flip]

    with patch.object(job, "hooks_of", hooks):
        yield flip
