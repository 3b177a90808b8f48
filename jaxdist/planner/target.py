"""The targets of planning: TPU slices or hosts with GPUs, which a slow network joins."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxdist.errors import MeshError, did_you_mean
from jaxdist.runtime.hardware import CHIPLET_LINKS, DEVICES, Device
from jaxdist.runtime.topology import FAMILIES, parse_topology, rings

_GPU = re.compile(r"([a-z0-9]+):(\d{1,5})x(\d{1,2})")
_SEVERAL = re.compile(r"(\d{1,4}) ?x ?([a-z].*)")
_GPU_NAMES = tuple(name for name in DEVICES if name not in FAMILIES and name != "cpu")
Dims = tuple[int, ...]
"""The indices of dims of a torus."""


@dataclass(frozen=True)
class Target:
    """The chips to plan for.

    Attributes:
      text: the text of a single slice, or of all hosts with GPUs, as on the command line.
      device: the speed and memory of a device.
      shape: the shape of a slice's torus, with a last dim for the devices of a chip if a chip has
        two devices. For GPUs, the shape is the number of GPUs in a host.
      slices: the number of slices, or of hosts with GPUs.
      ends_joined: for each dim of `shape`, whether the devices along the dim form a ring.
      per_chip: the number of devices of a chip, which share the chip's links.
    """

    text: str
    device: Device
    shape: Dims
    slices: int
    ends_joined: tuple[bool, ...]
    per_chip: int = 1

    @property
    def is_tpu(self) -> bool:
        """Whether the chips are TPUs; programs for TPUs can be compiled on other machines."""
        return self.device.clock_hz is not None

    @property
    def devices(self) -> int:
        """The number of devices of all slices, as jax counts them."""
        return math.prod(self.shape) * self.slices

    @property
    def chips(self) -> int:
        """The number of chips of all slices.

        >>> parse_target("tpu7x:4x4x4").chips, parse_target("tpu7x:4x4x4").devices
        (64, 128)
        """
        return self.devices // self.per_chip

    @property
    def words(self) -> str:
        """The target as text, with the number of slices if there are several.

        >>> parse_target("v5p:4x4x4", 2).words
        '2 x v5p:4x4x4'
        """
        return self.text if self.slices == 1 or not self.is_tpu else f"{self.slices} x {self.text}"

    def times(self, factor: int) -> Target:
        """Return the target with `factor` times as many slices."""
        return replace(self, slices=self.slices * factor)

    def ports(self, dims: Dims) -> int:
        """Return the number of links on which a device sends in a collective.

        Args:
          dims: the dims of the torus that the collective spans from end to end.
        """
        if not self.is_tpu:
            return 1
        far = self.far(dims)
        # A chip on a ring of two chips has only one neighbor, as on a line. The link within a chip
        # counts as 1.
        return sum(2 if self.ends_joined[d] and self.shape[d] > 2 else 1 for d in far) or 1

    def hops(self, dims: Dims) -> int:
        """Return the number of hops to the farthest device in a collective.

        Args:
          dims: the dims of the torus that the collective spans from end to end.
        """
        if not self.is_tpu:
            return 1
        return sum(
            self.shape[d] // 2 if self.ends_joined[d] and self.shape[d] > 2 else self.shape[d] - 1
            for d in self.far(dims)
        )

    def link_rate(self, dims: Dims) -> float:
        """Return the bytes per second that a device sends on a link in a collective over `dims`.

        The devices of a chip share the chip's links, unless the collective includes both devices
        (as in `jaxdist.cost.torus`). On GPUs, an axis without dims crosses the slow network.
        """
        rate, far = self.device.fast.bytes_per_second, self.far(dims)
        if not self.is_tpu:
            return rate if dims else self.device.slow.bytes_per_second
        if self.per_chip == 1:
            return rate
        if len(far) == len(dims):
            return rate / self.per_chip
        return rate if far else CHIPLET_LINKS * rate

    def far(self, dims: Dims) -> Dims:
        """Return the dims among `dims` along which devices are on different chips."""
        return dims if self.per_chip == 1 else tuple(d for d in dims if d < len(self.shape) - 1)


def ring_hops(target: Target, dims: Dims) -> int:
    """Return the largest number of hops of a message if each chip sends to the next chip of a ring.

    If the chips form a line and not a ring, the message from the last chip to the first passes all
    other chips.

    Args:
      target: the chips.
      dims: the dims of the torus that the chips occupy from end to end.

    >>> ring_hops(parse_target("v5p:4x4x4"), (2,)), ring_hops(parse_target("v5e:4x4"), (1,))
    (1, 3)
    """
    if not target.is_tpu:
        return 1
    lines = [target.shape[d] - 1 for d in dims if not target.ends_joined[d]]
    return max(lines, default=1)


def parse_targets(texts: Sequence[str], slices: int = 1) -> tuple[Target, ...]:
    """Parse targets in the form of the command line.

    Args:
      texts: the targets, such as `v5p:4x4x4` or `4xv5e:16x16`.
      slices: the number of slices of each target whose text does not begin with a number.

    Raises:
      MeshError: a text is not a target, or two targets are equal.

    >>> [one.words for one in parse_targets(["v5p:4x4x4", "4xv5e:16x16"], 2)]
    ['2 x v5p:4x4x4', '4 x v5e:16x16']
    """
    targets = [parse_target(text, slices) for text in texts]
    for number, one in enumerate(targets):
        if one in targets[:number]:
            raise MeshError(f"{one.words} is named twice: name each target once")
    return tuple(targets)


def parse_target(text: str, slices: int = 1) -> Target:
    """Parse a target, which is a TPU slice such as `v5p:8x8x8` or GPUs such as `h100:16x8`.

    The numbers of `h100:16x8` are the number of hosts and the number of GPUs in a host.

    Args:
      text: the target. Several equal slices are written `4xv5p:8x8x8`.
      slices: the number of slices if `text` does not begin with a number.

    Raises:
      MeshError: the text is not a target, or the speed of the chip is unknown.

    >>> parse_target("h100:16x8").chips, parse_target("4xv5e:16x16").chips
    (128, 1024)
    """
    several = _SEVERAL.fullmatch(text)
    if several:
        text, slices = several[2], int(several[1])
        if not slices:
            raise MeshError(f"0 slices of {text} are not a target: use 1 slice or more")
    found = _GPU.fullmatch(text)
    if found and found[1] in _GPU_NAMES:
        hosts, each = int(found[2]) * slices, int(found[3])
        if hosts < 1 or each < 1:
            raise MeshError(
                f"topology {text!r} has no GPU: write hosts x GPUs per host, each at least 1"
            )
        written = f"{found[1]}:{hosts}x{each}"
        return Target(written, DEVICES[found[1]], (each,), hosts, (False,))
    if text.partition(":")[0] not in FAMILIES:
        names = (*FAMILIES, *_GPU_NAMES)
        raise MeshError(
            f"topology {text!r}: {did_you_mean(text.partition(':')[0], names)}; write a TPU slice "
            "as v5p:8x8x8 or v5e:16x16, GPUs as hosts x GPUs of a host, h100:16x8"
        )
    slice_ = parse_topology(text)
    if slice_.family not in DEVICES:
        known = ", ".join(name for name in FAMILIES if name in DEVICES)
        raise MeshError(
            f"topology {text!r}: the speed and memory of {slice_.family} are not known to "
            f"jaxdist.runtime.hardware, so no plan can be made; known slices: {known}"
        )
    device, joined = DEVICES[slice_.family], rings(slice_.family, slice_.shape)
    each = FAMILIES[slice_.family].devices
    if each == 1:
        return Target(text, device, slice_.shape, slices, joined)
    return Target(text, device, (*slice_.shape, each), slices, (*joined, False), each)


@dataclass(frozen=True)
class Places:
    """The layout of the mesh axes on the torus of a slice.

    Each axis occupies dims of the torus from end to end.

    Attributes:
      sizes: the sizes of the axes stage, data and tensor.
      dims: the dims of the torus that the axes stage, data and tensor occupy.
      inner: the size of axis context or axis expert, or 1 if neither axis exists.
      inner_dims: the dims of the torus that axis context or axis expert occupies.
      slices: the size of axis data across the slow network if other axes cross this network too, or
        None if only axis data crosses it.
    """

    sizes: tuple[int, int, int]
    dims: tuple[Dims, Dims, Dims]
    inner: int = 1
    inner_dims: Dims = ()
    slices: int | None = None


MOST_WIDE = 64
"""The largest size of the axes stage and context across hosts with GPUs in the search."""


def wide_meshes(target: Target, *, context: bool) -> Iterator[Places]:
    """Yield layouts in which the axes stage, data and context divide the hosts with GPUs.

    At least one of the axes stage and context is larger than 1. The sizes of these two axes are
    powers of two up to `MOST_WIDE`. Axis tensor has all GPUs of a host. On TPUs there is no such
    layout.

    Args:
      target: the devices.
      context: whether axis context may be larger than 1.
    """
    if target.is_tpu:
        return
    sizes = [2**n for n in range(MOST_WIDE.bit_length())]
    for stage, inner in itertools.product(sizes, sizes if context else [1]):
        if stage * inner > 1 and target.slices % (stage * inner) == 0:
            slices = target.slices // (stage * inner)
            yield Places((stage, 1, target.shape[0]), ((), (), (0,)), inner, (), slices)


def inner_meshes(target: Target, *, alone: bool) -> Iterator[Places]:
    """Yield every layout of the axes stage, data, tensor, and context or expert, in a slice.

    The size of axis context or axis expert is 2 or more.

    Args:
      target: the chips.
      alone: whether the axes stage and tensor must be absent.
    """
    for (stage, data, tensor, inner), dims in _layouts(target, 4):
        if inner > 1 and not (alone and stage * tensor > 1):
            yield Places((stage, data, tensor), (dims[0], dims[1], dims[2]), inner, dims[3])


def meshes(target: Target) -> Iterator[Places]:
    """Yield every layout of the axes stage, data and tensor in a slice.

    Each axis occupies dims of the torus from end to end, since jax refuses all other layouts. If
    the torus has rings, these dims are rings. Of several layouts with equal sizes, only the layout
    that jax chooses is yielded, which is the first.
    """
    for (stage, data, tensor), dims in _layouts(target, 3):
        yield Places((stage, data, tensor), (dims[0], dims[1], dims[2]))


def _layouts(target: Target, count: int) -> Iterator[tuple[Dims, list[Dims]]]:
    """Yield the sizes of the axes of every layout, and the dims of the torus of each axis.

    Axis stage is the first of the `count` axes. On GPUs its size is 1, and the other axes share the
    GPUs of a host.
    """
    if not target.is_tpu:
        (chips,) = target.shape
        for split in itertools.product(_divisors(chips), repeat=count - 2):
            if chips % math.prod(split) == 0:
                yield (1, chips // math.prod(split), *split), [(), *((0,),) * (count - 1)]
        return
    dims = [d for d, size in enumerate(target.shape) if size > 1]
    seen: set[Dims] = set()
    for owners in itertools.product(range(count), repeat=len(dims)):
        taken = [
            tuple(d for d, o in zip(dims, owners, strict=True) if o == own) for own in range(count)
        ]
        sizes = tuple(math.prod(target.shape[d] for d in own) for own in taken)
        if sizes not in seen:
            seen.add(sizes)
            yield sizes, taken


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
