"""Digests of the replicas of a shard, which detect a wrong bit and name the device that has it.

A device that computes or stores wrong values raises no error: training continues with wrong
numbers. But replicas of the same shard must have the same bits, so different digests reveal a
fault. Two faults stay hidden: a fault in a shard that has a single replica, and a value that was
wrong before an all-reduce, which makes the value wrong on all replicas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxdist.mesh import Device, entry_names
from jaxdist.models.remat import HOST_MEMORY
from jaxdist.trees import flatten_with_names, leaf_bytes
from jaxdist.types import Leaf, PyTree

LANES = 2
"""The number of 32-bit words in a digest."""
_LISTED = 3
_GOLDEN = 0x9E3779B9
"""The integer nearest to 2^32 over the golden ratio. The multiples of this integer modulo 2^32 are
far apart, so neighboring elements of an array get very different summands."""


class ReplicaDifference(NamedTuple):
    """A shard whose replicas are not equal.

    Attributes:
      leaf: the name of the leaf in the tree.
      holders: the devices that hold a replica of the shard.
      odd: the devices whose replicas differ from a majority of equal replicas, or () if there is no
        such majority.
    """

    leaf: str
    holders: tuple[Device, ...]
    odd: tuple[Device, ...]

    def told(self, hosts: Mapping[int, str]) -> str:
        """Describe in one line which replicas differ.

        Args:
          hosts: the host name of each process, by process number.
        """
        if self.odd:
            equal = len(self.holders) - len(self.odd)
            verb = "differs" if len(self.odd) == 1 else "differ"
            return f"{self.leaf}: {_listed(self.odd, hosts)} {verb} from {equal} equal replicas"
        return (
            f"{self.leaf}: the replicas on {_listed(self.holders, hosts)} differ, and no majority "
            f"of the {len(self.holders)} replicas is equal, so the wrong replica cannot be "
            "identified"
        )


def _listed(devices: Sequence[Device], hosts: Mapping[int, str]) -> str:
    names = [
        f"device {device.id} (process {device.process_index} on {hosts[device.process_index]})"
        for device in devices
    ]
    more = [f"{len(names) - _LISTED} more"] if len(names) > _LISTED else []
    *first, last = [*names[:_LISTED], *more]
    return f"{', '.join(first)} and {last}" if first else last


@dataclass(frozen=True)
class Coverage:
    """The part of a device's shards that has replicas on other devices.

    Attributes:
      held_bytes: the bytes of one device's shards of all leaves.
      compared_bytes: the part of `held_bytes` of which another device has a replica.
    """

    held_bytes: int
    compared_bytes: int

    @property
    def share(self) -> float:
        """The fraction of a device's bytes that can be compared, from 0 to 1."""
        return self.compared_bytes / self.held_bytes if self.held_bytes else 0.0


@dataclass(frozen=True, eq=False)
class Replicas:
    """A comparison of the replicas of a tree's shards on a mesh.

    Attributes:
      mesh: the mesh that holds the tree.
      shapes: the tree as `jax.ShapeDtypeStruct`s, each with a `NamedSharding` on `mesh`.
    """

    mesh: Mesh
    shapes: PyTree

    @cached_property
    def digests(self) -> jax.stages.Wrapped:
        """The function from the tree to the digest of each device's shard of each leaf.

        The function returns an array of uint32, `[*mesh, leaves, 2]`, with a replica on every
        device. Each device reads its shards once and makes no copy. Then all devices gather the
        digests, 8 bytes for each leaf and device.
        """
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, self.shapes)
        axes = self.mesh.axis_names

        def own(tree: PyTree) -> jax.Array:
            found = jnp.stack([digest(leaf) for leaf in jax.tree.leaves(tree)])
            return found.reshape(*(1 for _ in axes), *found.shape)

        mapped = jax.shard_map(
            own, mesh=self.mesh, in_specs=(specs,), out_specs=PartitionSpec(*axes), check_vma=False
        )

        def all_of(tree: PyTree) -> jax.Array:
            return mapped(jax.tree.map(_on_device, tree, self.shapes))

        # The array of digests is replicated, so that every process can read all digests.
        whole = jax.sharding.NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(all_of, out_shardings=whole)

    @cached_property
    def coverage(self) -> Coverage:
        """The bytes of a device's shards, and how many of these have replicas elsewhere."""
        held = [(leaf_bytes(_shard(leaf)), self._apart(leaf)) for leaf in self._leaves.values()]
        return Coverage(sum(size for size, _ in held), sum(size for size, apart in held if apart))

    def differences(self, digests: np.ndarray) -> tuple[ReplicaDifference, ...]:
        """Return the shards whose replicas differ.

        Args:
          digests: the array `[*mesh, leaves, 2]` that the function `digests` returns.
        """
        found: list[ReplicaDifference] = []
        for number, (name, leaf) in enumerate(self._leaves.items()):
            apart = self._apart(leaf)
            if not apart:
                continue
            holders = _rows(self.mesh.devices, apart)
            values = _rows(_as_one(digests[..., number, :]), apart)
            for row in np.flatnonzero((values != values[:, :1]).any(axis=1)):
                found.append(_difference(name, holders[row], values[row]))
        return tuple(found)

    @cached_property
    def _leaves(self) -> dict[str, Leaf]:
        return dict(flatten_with_names(self.shapes))

    def _apart(self, leaf: Leaf) -> tuple[int, ...]:
        """Return the positions of the mesh axes along which a leaf is replicated."""
        split = {name for entry in leaf.sharding.spec for name in entry_names(entry)}
        sizes = self.mesh.shape.items()
        return tuple(at for at, (name, size) in enumerate(sizes) if size > 1 and name not in split)


def digest(leaf: jax.Array) -> jax.Array:
    """Compute the digest of an array's bits, uint32 `[2]`, which no order of summation changes.

    The array is read as words x_i of at most 32 bits. The digest is two sums modulo 2^32: the sum
    of x_i (2 i + 1), and the sum of h(x_i + g i). The function h is bijective and scatters bits,
    and g is odd. The multipliers of the first sum are odd and h is bijective, so a change of a
    single word changes both sums. Changes of several words may cancel each other in the first sum.
    In the second sum, such changes cancel each other with a probability of 2^-32.

    >>> [int(word) for word in digest(jnp.array([1, 0, 2], jnp.int32))]
    [11, 239823234]
    """
    words = _words(leaf)
    place = _places(words.shape)
    both = words * (2 * place + 1), _scattered(words + place * jnp.uint32(_GOLDEN))
    zero = jnp.uint32(0)

    # Both sums are computed in a single reduction: if two reductions read the words, XLA would
    # write the words to memory.
    def add(one: Sequence[jax.Array], other: Sequence[jax.Array]) -> list[jax.Array]:
        return [a + b for a, b in zip(one, other, strict=True)]

    return jnp.stack(lax.reduce(both, (zero,) * LANES, add, tuple(range(words.ndim))))


def _words(leaf: jax.Array) -> jax.Array:
    """Return the bits of each element as uint32: two words for 64 bits, 0 or 1 for a bool."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    bits = min(8 * leaf.dtype.itemsize, 32)
    return lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)


def _places(shape: tuple[int, ...]) -> jax.Array:
    """Return the row-major index of each element of an array, uint32, in the shape of the array.

    The array is not flattened, because that would copy an array whose layout is not row-major.
    """
    place = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :]) % 2**32
        place += lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
    return place


def _scattered(words: jax.Array) -> jax.Array:
    """Apply a bijection of 32-bit words that scatters bits: the finalizer of MurmurHash3."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


def _on_device(leaf: jax.Array, shape: Leaf) -> jax.Array:
    """Copy a leaf that is in the host's memory to the device; other leaves are unchanged."""
    there = shape.sharding.memory_kind == HOST_MEMORY
    return jax.device_put(leaf, jax.memory.Space.Device) if there else leaf


def _shard(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)


def _as_one(digests: np.ndarray) -> np.ndarray:
    """Combine the two words of each digest, `[..., 2]`, into a single uint64, `[...]`."""
    return digests[..., 0].astype(np.uint64) << np.uint64(32) | digests[..., 1]


def _rows(values: np.ndarray, apart: tuple[int, ...]) -> np.ndarray:
    """Rearrange an array of the mesh's shape to `[shards, replicas]`.

    Args:
      values: one value for each device of the mesh.
      apart: the positions of the mesh axes along which a leaf is replicated.
    """
    moved = np.moveaxis(values, apart, range(-len(apart), 0))
    return moved.reshape(-1, math.prod(moved.shape[-len(apart) :]))


def _difference(name: str, holders: np.ndarray, values: np.ndarray) -> ReplicaDifference:
    # Without a strict majority it is unknown which replicas are wrong.
    (common, count), *_ = Counter(values.tolist()).most_common(1)
    odd = holders[values != common] if 2 * count > len(values) else ()
    return ReplicaDifference(name, tuple(holders), tuple(odd))
