"""The matrices in a tree of parameters, and their exchange between devices that hold parts of them.

An update rule for whole matrices (Newton-Schulz) runs on a single device for each matrix, the
*owner* of the matrix. If shards split a matrix, an all-to-all sends its parts to the owner, and a
second all-to-all returns the results. If only the dims that count matrices are split (layers,
heads), nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxdist.mesh import entry_names

HEADS = ("heads", "kv_heads")
"""The names of the dims that count attention heads."""
Rule = Callable[[jax.Array], jax.Array]
"""A function from float32 matrices `[K, m, n]` to matrices of the same shape."""


@dataclass(frozen=True)
class Matrices:
    """The matrices in a tensor.

    Attributes:
      shape: the shape of the tensor.
      kept: the positions of the dims along which each index is a separate matrix.
      rows: the positions of the dims that together form the rows of a matrix (its inputs), in
        order.
      columns: the positions of the dims that together form the columns (its outputs), in order.
    """

    shape: tuple[int, ...]
    kept: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def inner(self) -> tuple[int, ...]:
        """The positions of the dims inside a matrix, rows first."""
        return self.rows + self.columns

    @property
    def count(self) -> int:
        """The number of matrices in the tensor."""
        return math.prod(self.shape[i] for i in self.kept)

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of rows and columns of each matrix."""
        rows, columns = (
            math.prod(self.shape[i] for i in dims) for dims in (self.rows, self.columns)
        )
        return rows, columns


def matrices_in(
    shape: Sequence[int], dims: Sequence[str | None], *, split_heads: bool = False
) -> Matrices | None:
    """Return the matrices in a tensor, or None for a vector or a stack of vectors.

    The last dim forms the columns. All earlier dims except layers form the rows, including the
    window of a convolution. A dim of heads and the dim after it count as one dim, so that a
    projection to heads is one matrix.

    Args:
      dims: the logical dims of the tensor.
      split_heads: whether each head of a projection to heads is a separate matrix.

    >>> shape, dims = (3, 8, 4, 2), ("layers", "embed", "heads", "head_dim")
    >>> matrices_in(shape, dims).size
    (8, 8)
    >>> heads = matrices_in(shape, dims, split_heads=True)
    >>> heads.count, heads.size
    (12, (8, 2))
    """
    kept = tuple(i for i, dim in enumerate(dims) if dim == "layers")
    rest = [i for i in range(len(shape)) if i not in kept]
    joined: list[list[int]] = []
    for i in rest:
        if joined and dims[joined[-1][-1]] in HEADS:
            joined[-1].append(i)
        else:
            joined.append([i])
    if len(joined) < 2:
        return None
    *rows, columns = joined
    if split_heads and dims[columns[0]] in HEADS and len(columns) > 1:
        kept, columns = (*kept, columns[0]), columns[1:]
    return Matrices(tuple(shape), kept, tuple(i for part in rows for i in part), tuple(columns))


@dataclass(frozen=True)
class Held:
    """The part of a tensor's matrices that a device holds.

    Attributes:
      of: the matrices of the whole tensor.
      entries: for each dim of the tensor, the mesh axes that split the dim.
      parts: for each dim, the number of parts into which these axes split the dim.
    """

    of: Matrices
    entries: tuple[tuple[str, ...], ...]
    parts: tuple[int, ...]

    @property
    def filled(self) -> tuple[int, ...]:
        """The tensor's shape, padded so that the parts of each dim are equal."""
        pairs = zip(self.of.shape, self.parts, strict=True)
        return tuple(-(-length // parts) * parts for length, parts in pairs)

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of a device's block of the padded tensor."""
        return tuple(n // parts for n, parts in zip(self.filled, self.parts, strict=True))

    @property
    def count(self) -> int:
        """The number of matrices of which a device holds a part."""
        return math.prod(self.local[i] for i in self.of.kept)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which devices hold parts of the same matrices."""
        return tuple(axis for i in self.of.inner for axis in self.entries[i])

    @property
    def devices(self) -> int:
        """The number of devices that hold parts of the same matrix."""
        return math.prod(self.parts[i] for i in self.of.inner)

    @property
    def block(self) -> tuple[int, ...]:
        """The shape of a device's part of a matrix: the lengths of the dims of rows and columns."""
        return tuple(self.local[i] for i in self.of.inner)

    @property
    def alike(self) -> tuple[object, ...]:
        """The key by which tensors are grouped.

        The matrices of tensors with equal keys are sent together.
        """
        inner = self.of.inner
        named = tuple((self.of.shape[i], self.entries[i], self.parts[i]) for i in inner)
        return len(self.of.rows), named

    def taken(self, block: jax.Array) -> jax.Array:
        """Convert a device's block of the tensor to the parts of matrices, `[matrices, *block]`."""
        moved = block.transpose(*self.of.kept, *self.of.inner)
        return moved.reshape(self.count, *self.block)

    def put(self, matrices: jax.Array) -> jax.Array:
        """Invert `taken`: convert the parts of matrices to the device's block of the tensor."""
        order = (*self.of.kept, *self.of.inner)
        moved = matrices.reshape(*(self.local[i] for i in order))
        return moved.transpose(*(order.index(i) for i in range(len(order))))

    def join(self, pieces: jax.Array) -> jax.Array:
        """Join the parts from all devices, `[devices, K, *block]`, into K matrices `[K, m, n]`."""
        inner = self.of.inner
        count, block = pieces.shape[1], self.block
        apart = pieces.reshape(*(self.parts[i] for i in inner), count, *block)
        more = len(inner)
        # The dim that counts parts comes directly before the dim of the parts' elements, so that
        # the reshape joins both to one dim.
        order = [more, *(at for i in range(more) for at in (i, more + 1 + i))]
        whole = apart.transpose(*order).reshape(count, *(self.filled[i] for i in inner))
        cut = whole[(slice(None), *(slice(self.of.shape[i]) for i in inner))]
        return cut.reshape(count, *self.of.size)

    def part(self, matrices: jax.Array) -> jax.Array:
        """Split matrices into the parts of all devices: the inverse of `join`."""
        inner, count = self.of.inner, matrices.shape[0]
        whole = matrices.reshape(count, *(self.of.shape[i] for i in inner))
        fill = [(0, 0), *((0, self.filled[i] - self.of.shape[i]) for i in inner)]
        sizes = [n for i in inner for n in (self.parts[i], self.local[i])]
        apart = jnp.pad(whole, fill).reshape(count, *sizes)
        more = len(inner)
        order = [*(1 + 2 * i for i in range(more)), 0, *(2 + 2 * i for i in range(more))]
        return apart.transpose(*order).reshape(self.devices, count, *self.block)


@dataclass(frozen=True)
class Group:
    """The tensors whose matrices are sent together, and the owner of each matrix.

    Attributes:
      members: the positions of the tensors in the list that `plan_matrices` receives.
      held: for each member, the part of its matrices that a device holds.
      last: the owners of the matrices that remain after each device got an equal number. For each
        device, the tuple has the index of the remaining matrix that the device owns, or None if the
        device owns none of them. The tuple is empty if no matrix remains.
    """

    members: tuple[int, ...]
    held: tuple[Held, ...]
    last: tuple[int | None, ...] = ()

    @property
    def devices(self) -> int:
        return self.held[0].devices

    @property
    def count(self) -> int:
        """The number of matrices of which a device holds a part."""
        return sum(held.count for held in self.held)

    @property
    def full(self) -> int:
        """The number of matrices that every device owns, without the remainder in `last`."""
        return self.count // self.devices

    @property
    def slots(self) -> int:
        """The number of slots on each device: the largest number of matrices that a device owns."""
        return self.full + bool(self.last)

    @property
    def sent_bytes(self) -> int:
        """The bytes that a device sends to other devices in a step, for matrices and results."""
        return 2 * (self.devices - 1) * self.slots * math.prod(self.held[0].block) * 4

    @cached_property
    def order(self) -> np.ndarray:
        """The index of the matrix in each slot of each device, or `count` for an empty slot.

        The shape is `[devices, slots]`.
        """
        found = np.arange(self.devices * self.full).reshape(self.devices, self.full)
        if not self.last:
            return found
        column = [self.count if at is None else at for at in self.last]
        return np.concatenate([found, np.array(column)[:, None]], axis=1)

    def apply(self, rule: Rule, blocks: Sequence[jax.Array]) -> list[jax.Array]:
        """Apply `rule` to all matrices of the group, inside a manual `jax.shard_map`.

        Args:
          blocks: this device's block of each member.
        """
        first = self.held[0]
        taken = [held.taken(block) for held, block in zip(self.held, blocks, strict=True)]
        mine = jnp.concatenate(taken) if len(taken) > 1 else taken[0]
        if self.devices == 1:
            # A single device already has whole matrices, so a reshape is enough. `join` would also
            # transpose the dims of size 1.
            done = rule(mine.reshape(-1, *first.of.size)).reshape(mine.shape)
        else:
            done = self._exchanged(rule, mine)
        ends = np.cumsum([held.count for held in self.held])[:-1]
        parts = jnp.split(done, ends) if len(taken) > 1 else [done]
        return [held.put(part) for held, part in zip(self.held, parts, strict=True)]

    def _exchanged(self, rule: Rule, mine: jax.Array) -> jax.Array:
        """Send every matrix to its owner, apply the rule there, and send the results back."""
        first, block = self.held[0], mine.shape[1:]
        if self.last:
            # An all-to-all needs the same number of slots on every device, so empty slots hold
            # zeros.
            mine = jnp.concatenate([mine, jnp.zeros((1, *block), mine.dtype)])[self.order.ravel()]
        sent = mine.reshape(self.devices, self.slots, *block)
        # The all-to-all turns a part of each of the K matrices into K / devices whole matrices.
        whole = first.join(jax.lax.all_to_all(sent, first.axes, 0, 0, tiled=True))
        done = rule(whole[: self.full]) if self.full else whole[:0]
        if self.last:
            owns = jnp.array([at is not None for at in self.last])
            alone = whole[self.full :]
            # Without the branch, a device would also apply the rule to an empty last slot.
            ruled = jax.lax.cond(owns[jax.lax.axis_index(first.axes)], rule, jnp.zeros_like, alone)
            done = jnp.concatenate([done, ruled])
        # The all-to-all turns K / devices whole matrices into a part of each of the K matrices.
        back = jax.lax.all_to_all(first.part(done), first.axes, 0, 0, tiled=True)
        flat = back.reshape(-1, *block)
        # The sort finds the slot of each matrix; empty slots come last and are cut off.
        places = np.argsort(self.order.ravel(), kind="stable")[: self.count]
        return flat[places] if self.last else flat


@dataclass(frozen=True)
class MatrixExchange:
    """The plan by which devices divide the work of an update rule for whole matrices.

    Attributes:
      mesh: the mesh, or None on a single device.
      axes: the mesh axes that split at least one of the tensors.
      specs: the partition spec of each tensor.
      held: the part of each tensor's matrices that a device holds.
      groups: the tensors in groups whose matrices are sent together.
    """

    mesh: Mesh | None
    axes: frozenset[str]
    specs: tuple[PartitionSpec, ...]
    held: tuple[Held, ...]
    groups: tuple[Group, ...]

    @property
    def sent_bytes(self) -> int:
        """The bytes that a device sends to other devices in a step, for all groups."""
        return sum(group.sent_bytes for group in self.groups)

    def apply(self, rule: Rule, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        """Apply `rule` to all matrices of the tensors."""

        def run(blocks: list[jax.Array]) -> list[jax.Array]:
            done = list(blocks)
            for group in self.groups:
                found = group.apply(rule, [blocks[i] for i in group.members])
                for i, block in zip(group.members, found, strict=True):
                    done[i] = block
            return done

        manual = jax.sharding.get_abstract_mesh().manual_axes
        if self.mesh is None or not self.axes:
            return run(list(tensors))
        # `jax.shard_map` splits only dims that the number of parts divides.
        filled = [
            jnp.pad(x, [(0, n - own) for n, own in zip(held.filled, x.shape, strict=True)])
            for x, held in zip(tensors, self.held, strict=True)
        ]
        specs = list(self.specs)
        # Inside another `jax.shard_map` some axes are already manual. The mesh of the context is
        # then used, and only the remaining axes become manual here.
        mapped = jax.shard_map(
            run,
            mesh=None if manual else self.mesh,
            axis_names={*self.mesh.axis_names} - {*manual},
            in_specs=(specs,),
            out_specs=specs,
            check_vma=False,
        )
        found = mapped(filled)
        return [y[tuple(map(slice, x.shape))] for x, y in zip(tensors, found, strict=True)]


def plan_matrices(
    matrices: Sequence[Matrices],
    specs: Sequence[PartitionSpec],
    mesh: Mesh | None,
    cost: Callable[[tuple[int, int]], float],
) -> MatrixExchange:
    """Plan the owner of every matrix.

    In each group of tensors, all devices own the same number of matrices, except for a remainder.
    The remaining matrices of all groups are assigned one by one, the most expensive first, each to
    the device with the least work (Graham 1969, longest processing time first). A device gets at
    most one of the remaining matrices of each group.

    Args:
      matrices: the matrices of each tensor.
      specs: the partition spec of each tensor.
      mesh: the mesh, or None on a single device.
      cost: a function from the numbers of rows and columns of a matrix to the rule's cost.
    """
    held = tuple(held_of(of, spec, mesh) for of, spec in zip(matrices, specs, strict=True))
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, one in enumerate(held):
        alike.setdefault(one.alike, []).append(i)
    groups = [Group(tuple(at), tuple(held[i] for i in at)) for at in alike.values()]
    # A number means the same device only in groups that are split along the same axes, so loads are
    # added up for each choice of axes separately.
    loads: dict[tuple[str, ...], list[float]] = {}
    done: list[Group] = []
    for group in sorted(groups, key=lambda group: -cost(group.held[0].of.size)):
        first = group.held[0]
        load = loads.setdefault(first.axes, [0.0] * group.devices)
        last: list[int | None] = [None] * group.devices
        for number in range(group.devices * group.full, group.count):
            # In each group, a device gets at most one of the remaining matrices.
            free = [at for at in range(group.devices) if last[at] is None]
            owner = min(free, key=lambda at: load[at])
            load[owner] += cost(first.of.size)
            last[owner] = number
        left = group.count % group.devices
        done.append(Group(group.members, group.held, tuple(last) if left else ()))
    axes = frozenset(axis for one in held for entry in one.entries for axis in entry)
    return MatrixExchange(mesh, axes, tuple(_spec(one) for one in held), held, tuple(done))


def held_of(of: Matrices, spec: PartitionSpec, mesh: Mesh | None) -> Held:
    """Return the part of a tensor's matrices that each device holds."""
    sizes: Mapping[str, int] = {} if mesh is None else dict(mesh.shape)
    whole = [*spec, *(None,) * (len(of.shape) - len(spec))]
    entries = tuple(tuple(a for a in entry_names(entry) if sizes[a] > 1) for entry in whole)
    parts = tuple(math.prod(sizes[axis] for axis in entry) for entry in entries)
    return Held(of, entries, parts)


def _spec(held: Held) -> PartitionSpec:
    return PartitionSpec(*(entry or None for entry in held.entries))
