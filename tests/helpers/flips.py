"""Memory that forgets: one bit of one device's replica of an array, changed."""

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
    """How many bits of one device's shard can flip; of a bool but its value."""
    shard = leaf.addressable_shards[0].data
    return shard.size * (1 if leaf.dtype == np.bool_ else 8 * leaf.dtype.itemsize)


def with_bit_flipped(leaf: jax.Array, bit: int, device: jax.Device) -> jax.Array:
    """The array as it is, but for bit number `bit` of the shard that `device` holds, if it is of
    this process."""
    # Copied: XLA:CPU may hand out the memory itself.
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
    """Flips a bit of one device's replica of a parameter, after all other hooks of a step.

    Attributes:
      steps: after which; each passes once.
      flipped: how often it has.
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
    """Runs of `jaxdist train` in this process have such a device."""
    plain = job.hooks_of

    def hooks(*given: Any) -> Any:
        found, measured = plain(*given)
        return [*found, flip], measured

    with patch.object(job, "hooks_of", hooks):
        yield flip
