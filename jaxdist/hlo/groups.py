"""The groups of devices that take part in a collective, and the mesh axes that they span.

HLO has four notations for groups. The first notation is a list of lists, `{{0,1},{2,3}}`. The
second is an iota that is reshaped, `[2,4]<=[8]`, and may be transposed, `T(1,0)`. The third has
axes of XLA's mesh, or parts of axes: `mesh['a'=2,'b'=4] {'b'}`. The fourth is for permutes:
`source_target_pairs={{0,1},{1,0}}`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from jaxdist.hlo.parse import Instruction, LedgerError, Module

Groups = tuple[tuple[int, ...], ...]
"""The members of each group, or the (source, target) pairs of a permute."""

_LISTS = re.compile(r"\b(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"\breplica_groups=(\[[\d,]+\]<=\S+?)(?:, |$)")
_MESH = re.compile(
    r"\breplica_groups=mesh\[([^\]]*)\](?:, device_ids=\(((?:[^()]|\([^()]*\))*)\))? \{([^}]*)\}"
)
_SUB_AXIS = re.compile(r"(.*):\((\d+)\)(\d+)$")
_BY_PARTITION = ("all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast")


def _integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def evaluate_iota(text: str) -> np.ndarray:
    """Return the array that HLO writes as `[shape]<=[source]T(order)`.

    The array is an iota of the shape `source`, transposed by `order`, and reshaped to `shape`.

    Raises:
      LedgerError: the text does not have this form.

    >>> evaluate_iota("[4,2]<=[2,4]T(1,0)").tolist()
    [[0, 4], [1, 5], [2, 6], [3, 7]]
    """
    found = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if found is None:
        raise LedgerError(
            f"replica groups {text!r} have an unknown syntax: use a version of "
            "jax that jaxdist supports"
        )
    source = _integers(found[2])
    array = np.arange(math.prod(source)).reshape(source)
    return array.transpose(_integers(found[3]) if found[3] else None).reshape(_integers(found[1]))


def _mesh_groups(sizes_text: str, devices_text: str | None, axes_text: str) -> np.ndarray:
    """Return the groups along axes of XLA's mesh, as an array [group, member].

    The notation for a part of an axis is `'a':(before)size`. The axis is reshaped to
    `[before, size, rest]`, and the groups span the middle dim.

    Args:
      sizes_text: the names and sizes of the axes of the mesh.
      devices_text: the order of the devices in the mesh, or None for increasing order.
      axes_text: the axes, or parts of axes, that the groups span.
    """
    sizes = {name: int(size) for name, size in re.findall(r"([^,=]+)=(\d+)", sizes_text)}
    count = math.prod(sizes.values())
    if devices_text is None:
        devices = np.arange(count)
    elif devices_text.startswith("["):
        devices = evaluate_iota(f"[{count}]<={devices_text}")
    else:
        devices = np.array(_integers(devices_text))
    parts: dict[str, set[tuple[int, int]]] = {name: set() for name in sizes}
    for axis in axes_text.split(","):
        sub = _SUB_AXIS.match(axis)
        name, before, size = (sub[1], int(sub[2]), int(sub[3])) if sub else (axis, 1, sizes[axis])
        parts[name].add((before, size))
    shape: list[int] = []
    grouped: list[int] = []
    for name, whole in sizes.items():
        cuts = {1, whole} | {
            edge for before, size in parts[name] for edge in (before, before * size)
        }
        edges = sorted(cuts)
        for low, high in itertools.pairwise(edges):
            if any(before <= low and high <= before * size for before, size in parts[name]):
                grouped.append(len(shape))
            shape.append(high // low)
    rest = [dim for dim in range(len(shape)) if dim not in grouped]
    width = math.prod(shape[dim] for dim in grouped)
    return devices.reshape(shape).transpose(rest + grouped).reshape(-1, width)


def written_groups(attributes: str, everyone: int) -> Groups:
    """Parse the groups of devices, or the pairs of devices, in an instruction's attributes.

    Args:
      attributes: the text after the operands of the instruction.
      everyone: the number of members of the single group to which all devices belong if the groups
        are absent or empty.

    Raises:
      LedgerError: the notation of the groups is unknown.

    >>> written_groups("replica_groups=mesh['a'=2,'b'=4] {'a'}", 8)
    ((0, 4), (1, 5), (2, 6), (3, 7))
    """
    if found := _LISTS.search(attributes):
        lists = re.findall(r"\{([\d,]*)\}", found[1])
        groups = tuple(tuple(_integers(text)) for text in lists)
        return groups or (tuple(range(everyone)),)
    if found := _MESH.search(attributes):
        array = _mesh_groups(*found.groups())
    elif found := _IOTA.search(attributes):
        array = evaluate_iota(found[1])
    elif "replica_groups=" in attributes:
        start = attributes.index("replica_groups=")
        raise LedgerError(
            f"{attributes[start : start + 80]!r}: the replica groups have an unknown syntax; "
            "use a version of jax that jaxdist supports"
        )
    else:
        return (tuple(range(everyone)),)
    return tuple(map(tuple, array.tolist()))


def group_positions(instruction: Instruction, kind: str, module: Module) -> Groups:
    """Return the groups of a collective as positions in the program's device assignment.

    The meaning of the numbers in the text depends on the instruction. With `use_global_device_ids`
    the numbers are positions. Without a channel the numbers are replicas, and each partition has
    separate groups. With a channel, the numbers are partitions for the kinds in `_BY_PARTITION`,
    which only move data. For all other kinds with a channel, the numbers are replicas, and a group
    contains all partitions of its replicas.

    Args:
      instruction: the instruction of the collective.
      kind: the kind of collective.
      module: the parsed HLO program.
    """
    replicas, partitions = module.replicas, module.partitions
    attributes = instruction.attributes
    if "use_global_device_ids=true" in attributes:
        return written_groups(attributes, module.devices)
    if instruction.number("channel_id") is None:
        groups = written_groups(attributes, replicas)
        return tuple(
            tuple(r * partitions + p for r in g) for p in range(partitions) for g in groups
        )
    if kind in _BY_PARTITION:
        groups = written_groups(attributes, partitions)
        return tuple(tuple(r * partitions + p for p in g) for r in range(replicas) for g in groups)
    groups = written_groups(attributes, replicas)
    return tuple(tuple(r * partitions + p for r in g for p in range(partitions)) for g in groups)


@dataclasses.dataclass(frozen=True, eq=False)
class MeshLayout:
    """The mesh coordinates of each device in a program's device assignment."""

    axes: Mapping[str, int]
    """The size of each mesh axis, in mesh order."""
    order: tuple[int, ...]
    """For each device in the assignment, its index in the flattened array of the mesh's devices."""

    @cached_property
    def _coordinates(self) -> np.ndarray:
        """The mesh coordinates of each device in the assignment, as an array [position, axis]."""
        shape = tuple(self.axes.values())
        return np.stack(np.unravel_index(np.array(self.order), shape or (1,)), axis=-1)

    def _names(self, varies: np.ndarray) -> tuple[str, ...]:
        return tuple(name for name, moves in zip(self.axes, varies, strict=True) if moves)

    def size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.axes[axis] for axis in axes)

    def group_axes(self, groups: Groups) -> tuple[str, ...] | None:
        """Return the axes that the groups span, or None if the groups are not a product of axes.

        >>> MeshLayout({"data": 2, "tensor": 2}, (0, 1, 2, 3)).group_axes(((0, 2), (1, 3)))
        ('data',)
        >>> MeshLayout({"data": 2, "tensor": 2}, (0, 1, 2, 3)).group_axes(((0, 3), (1, 2)))
        """
        members = sorted(member for group in groups for member in group)
        if len({len(group) for group in groups}) != 1 or members != list(range(len(self.order))):
            return None
        if not self.axes:
            return ()
        coordinates = self._coordinates[np.array(groups)]
        varies = (coordinates != coordinates[:, :1]).any(axis=1)
        axes = self._names(varies.any(axis=0))
        # The members of a group are distinct, and differ only along `axes`. If their number is the
        # product of the sizes of these axes, the group contains all points along the axes.
        return axes if self.size(axes) == len(groups[0]) else None

    def pair_axes(self, pairs: Groups) -> tuple[str, ...]:
        """Return the axes along which the source and target of any pair of a permute differ.

        The tuple is empty if each device sends to itself.
        """
        if not pairs or not self.axes:
            return ()
        ends = self._coordinates[np.array(pairs)]
        return self._names((ends[:, 0] != ends[:, 1]).any(axis=0))
