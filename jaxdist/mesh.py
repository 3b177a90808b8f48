"""The config of the device mesh, the construction of a `jax.sharding.Mesh`, and its axis names.

The first axis is the slowest: the last axis connects the nearest devices. An axis that is split
over two networks becomes two axes of the `Mesh`, `data_dcn` (between slices or hosts) and
`data_ici` (inside a slice or host). Shardings and collectives can then name each of the two axes,
or both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh
from pydantic import Field, PrivateAttr, model_serializer, model_validator

from jaxdist.config.schema import Config, Count
from jaxdist.errors import MeshError


class MeshAxis(StrEnum):
    """The axes that a mesh can have. A mesh has *axes*, and a tensor has *dims*."""

    DATA = "data"
    STAGE = "stage"
    TENSOR = "tensor"
    CONTEXT = "context"
    EXPERT = "expert"


AXES = tuple(axis.value for axis in MeshAxis)
Device = Any
"""A `jax.Device`, which type checkers do not accept as a type."""
DCN, ICI = "_dcn", "_ici"


class Split(Config):
    """The two sizes of an axis that is split over a slow and a fast network."""

    dcn: Count
    """The size of the axis across the slow network (between slices or hosts)."""
    ici: Count
    """The size of the axis inside the fast network."""


class MeshConfig(Config):
    """The sizes of the mesh axes, in the order of the config.

    The axis across the slowest network comes first. One size may be -1, which means all remaining
    devices.
    """

    data: int | Split | None = None
    """The size of the axis that splits the batch and, with ZeRO, the training state. -1 takes all
    devices that the other axes leave over."""
    stage: int | Split | None = None
    """The size of the axis that splits the layers into pipeline stages; null has no such axis."""
    tensor: int | Split | None = None
    """The size of the axis that splits the work within a layer (tensor parallelism); null has no
    such axis."""
    context: int | Split | None = None
    """The size of the axis that splits the sequence (context parallelism); null has no such axis.
    """
    expert: int | Split | None = None
    """The size of the axis that splits the experts of a mixture of experts; null has no such axis.
    """
    fake_devices: Annotated[int, Field(ge=1, le=1024)] | None = None
    """The number of fake CPU devices on which to train, for tests without accelerators; null trains
    on the real devices."""

    _order: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _keep_order(cls, data: Any, handler: Any) -> MeshConfig:
        # The order of the keys in the config determines which devices are neighbors along each
        # axis, but a validated model has its fields in the order of the class.
        mesh = handler(data)
        if isinstance(data, Mapping):
            mesh._order = tuple(k for k in data if k in AXES and data[k] is not None)
        return mesh

    @model_validator(mode="after")
    def _check_sizes(self) -> MeshConfig:
        wildcards = [axis for axis in AXES if getattr(self, axis) == -1]
        if len(wildcards) > 1:
            raise ValueError(
                f"only one axis may be -1, but {' and '.join(wildcards)} are: give the sizes of "
                "the other axes"
            )
        for axis in AXES:
            size = getattr(self, axis)
            if isinstance(size, int) and (size == 0 or size < -1):
                raise ValueError(f"axis {axis} has size {size}: give 1 or more, or -1 for the rest")
        return self

    @model_serializer(mode="plain")
    def _serialize_in_order(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for axis in self._order:
            size = getattr(self, axis)
            values[axis] = size.model_dump() if isinstance(size, Split) else size
        if self.fake_devices is not None:
            values["fake_devices"] = self.fake_devices
        return values

    def sizes(self) -> dict[str, int | Split]:
        """Return the size of each axis in the order of the config.

        If the config has no axes, the result is `{data: -1}`.
        """
        return {axis: getattr(self, axis) for axis in self._order} or {MeshAxis.DATA.value: -1}


def describe_mesh(sizes: Mapping[str, int | Split]) -> str:
    """Format the sizes of a mesh in the form of a config.

    >>> describe_mesh({"data": 4, "tensor": 2})
    '{data: 4, tensor: 2}'
    """
    shown = (
        f"{axis}: {{dcn: {size.dcn}, ici: {size.ici}}}"
        if isinstance(size, Split)
        else f"{axis}: {size}"
        for axis, size in sizes.items()
    )
    return "{" + ", ".join(shown) + "}"


def _count(size: int | Split) -> int:
    return size.dcn * size.ici if isinstance(size, Split) else size


def propose(sizes: Mapping[str, int | Split], device_count: int) -> list[str]:
    """Propose meshes with the axes of `sizes` for another number of devices, most similar first.

    Args:
      sizes: the sizes of the mesh that does not fit.
      device_count: the number of devices.

    >>> propose({"data": 3, "tensor": 2}, 8)
    ['{data: 4, tensor: 2}', '{data: 2, tensor: 4}', '{data: 8, tensor: 1}']

    Sizes across the slow network are kept if their product divides the number of devices.

    >>> propose({"data": Split(dcn=2, ici=4)}, 16)
    ['{data: {dcn: 2, ici: 8}}']
    """
    slow = math.prod(size.dcn for size in sizes.values() if isinstance(size, Split))
    if device_count % slow:
        sizes, slow = {axis: _count(size) for axis, size in sizes.items()}, 1

    def factorings(n: int, k: int) -> list[tuple[int, ...]]:
        if k == 1:
            return [(n,)]
        divisors = [d for d in range(1, n + 1) if n % d == 0]
        return [(d, *rest) for d in divisors for rest in factorings(n // d, k - 1)]

    return _most_similar(sizes, factorings(device_count // slow, len(sizes)))


def _most_similar(
    sizes: Mapping[str, int | Split], inside: Iterable[tuple[int, ...]], most: int = 3
) -> list[str]:
    """Format the meshes whose sizes are most similar to `sizes`, the most similar mesh first.

    Args:
      sizes: the sizes of the mesh that does not fit. The sizes across the slow network are kept.
      inside: for each candidate, the size of each axis inside the fast network.
      most: the maximum number of meshes.
    """
    wanted = [max(s.ici if isinstance(s, Split) else s, 1) for s in sizes.values()]

    def distance(found: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        pairs = zip(found, wanted, strict=True)
        return sum(abs(math.log2(a / b)) for a, b in pairs), found

    return [
        describe_mesh(
            {
                axis: Split(dcn=size.dcn, ici=count) if isinstance(size, Split) else count
                for (axis, size), count in zip(sizes.items(), found, strict=True)
            }
        )
        for found in sorted(inside, key=distance)[:most]
    ]


def resolve_sizes(config: MeshConfig, device_count: int) -> dict[str, int | Split]:
    """Return the size of each axis, where a size of -1 is replaced by a number of devices.

    Args:
      config: the config of the mesh.
      device_count: the number of devices. An axis of size -1 gets this number divided by the
        product of the other sizes.

    Raises:
      MeshError: the mesh needs another number of devices than `device_count`; the message proposes
        meshes that fit.
    """
    sizes = config.sizes()
    known = math.prod(_count(size) for size in sizes.values() if size != -1)
    fits = known == device_count
    if -1 in sizes.values():
        fits = device_count % known == 0
        sizes = {a: device_count // known if s == -1 and fits else s for a, s in sizes.items()}
    if not fits:
        proposals = " or ".join(propose(sizes, device_count))
        needed = f"a multiple of {known}" if -1 in config.sizes().values() else str(known)
        raise MeshError(
            f"mesh {describe_mesh(config.sizes())} needs {needed} devices, but there are "
            f"{device_count}; meshes that fit: {proposals}; or run on fake CPU devices "
            f"with --devices {known}"
        )
    return sizes


def build_mesh(config: MeshConfig, devices: Sequence[Device] | None = None) -> Mesh:
    """Arrange devices as the mesh of a config, with the axis type `Auto` for all axes.

    Args:
      config: the config of the mesh.
      devices: the devices, or None for all devices.

    Raises:
      MeshError: the sizes do not fit the number of devices, the `dcn` sizes do not fit the number
        of hosts or slices, or an axis does not fill whole dims of a TPU torus.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = resolve_sizes(config, len(devices))
    names: list[str] = []
    dcn: list[int] = []
    ici: list[int] = []
    for axis, size in sizes.items():
        split = isinstance(size, Split)
        names += [axis + DCN, axis + ICI] if split else [axis]
        dcn += [size.dcn, 1] if split else [1]
        ici += [1, size.ici] if split else [size]
    types = (AxisType.Auto,) * len(names)
    try:
        if math.prod(dcn) > 1:
            return Mesh(_two_level(devices, dcn, ici), tuple(names), axis_types=types)
        # `jax.make_mesh` may reorder TPU devices, so that the axes are rings of the torus.
        return jax.make_mesh(tuple(ici), tuple(names), axis_types=types, devices=devices)
    # jax raises this error if an axis would fill only a part of a dim of the torus.
    except NotImplementedError as error:
        dims = _torus(devices)
        raise MeshError(
            f"mesh {describe_mesh(sizes)} does not map onto whole dims of a torus of "
            f"{'x'.join(map(str, dims))}, so that its axes would not be rings; meshes that do: "
            f"{' or '.join(_most_similar(sizes, _on_whole_dims(len(sizes), dims)))}"
        ) from error


def _torus(devices: Sequence[Device]) -> tuple[int, ...]:
    """Return the sizes of the torus of TPU devices, without dims of size 1.

    The cores of a chip are an additional dim.
    """
    places = np.array([(*device.coords, device.core_on_chip) for device in devices])
    sizes = places.max(axis=0) - places.min(axis=0) + 1
    return tuple(int(size) for size in sizes if size > 1)


def _on_whole_dims(axes: int, dims: Sequence[int]) -> set[tuple[int, ...]]:
    """Return the sizes of meshes whose axes fill whole dims of a torus.

    Args:
      axes: the number of axes.
      dims: the sizes of the torus.
    """
    return {
        tuple(
            math.prod(size for size, own in zip(dims, owner, strict=True) if own == axis)
            for axis in range(axes)
        )
        for owner in itertools.product(range(axes), repeat=len(dims))
    }


def _two_level(devices: list[Device], dcn: list[int], ici: list[int]) -> np.ndarray:
    """Arrange devices over two networks, in an array of shape `dcn` * `ici`, axis by axis.

    Args:
      devices: the devices of all fast networks.
      dcn: the size of each axis across the slow network.
      ici: the size of each axis inside a fast network.

    Raises:
      MeshError: the `dcn` sizes do not fit the number of hosts or slices.
    """
    # If devices have no `slice_index`, a fast network connects the devices of a process.
    granules = {getattr(d, "slice_index", d.process_index) for d in devices}
    if len(granules) > 1:
        try:
            return mesh_utils.create_hybrid_device_mesh(
                ici, dcn, devices, process_is_granule=not hasattr(devices[0], "slice_index")
            )
        except ValueError as error:
            raise MeshError(
                f"the product of the dcn sizes is {math.prod(dcn)}, but the devices are on "
                f"{len(granules)} hosts or slices: {error}. Set dcn sizes whose product is "
                f"{len(granules)}"
            ) from error
    # There is a single host (fake devices, tests): each block of consecutive devices represents a
    # fast network.
    blocks = np.asarray(devices).reshape(*dcn, *ici)
    # The dcn dim of each axis is moved before its ici dim, so that both can be merged into one dim.
    order = [i + offset for i in range(len(dcn)) for offset in (0, len(dcn))]
    return blocks.transpose(order).reshape([d * i for d, i in zip(dcn, ici, strict=True)])


def axis_names(mesh: Mesh, axis: str) -> tuple[str, ...]:
    """Return the names of an axis in a mesh.

    The result has no name if the mesh does not have the axis, and two names if the axis is split
    over two networks.
    """
    present = mesh.axis_names
    if axis in present:
        return (axis,)
    return tuple(name for name in (axis + DCN, axis + ICI) if name in present)


def entry_names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the names of the mesh axes in an entry of a partition spec.

    >>> entry_names("data"), entry_names(("data_dcn", "data_ici")), entry_names(None)
    (('data',), ('data_dcn', 'data_ici'), ())
    """
    return (entry,) if isinstance(entry, str) else entry or ()


def mesh_axis_size(mesh: Mesh, axis: str) -> int:
    """Return the number of devices along `axis`, or 1 if the mesh does not have the axis."""
    return math.prod(mesh.shape[name] for name in axis_names(mesh, axis))
