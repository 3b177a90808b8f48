"""The devices of a TPU topology, for which a program can be compiled without a TPU.

libtpu describes any topology, and compiles for it, on any Linux machine; only a run needs the
chips.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxdist.errors import MeshError, did_you_mean

ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""The variables that replace the metadata server when libtpu is loaded, and that let several
processes load libtpu at the same time."""
_LOADING = threading.Lock()
"""A lock for threads that compile at the same time, the first of which loads libtpu."""


@dataclass(frozen=True)
class TpuFamily:
    """A generation of TPU.

    Attributes:
      dims: the number of dims of the torus.
      most_chips: the number of chips of the largest slice; for v5p, this slice is less than a pod.
      example: an example of a topology.
      ring: the length at which the ends of a dim are joined, or None if cubes of 4 x 4 x 4 chips
        are joined to rings in all dims.
      chip_config: jax's name of the chip configuration.
      devices: the number of jax's devices on each chip.
    """

    dims: int
    most_chips: int
    example: str
    ring: int | None = None
    chip_config: str = "default"
    devices: int = 1


FAMILIES = {
    "v2": TpuFamily(2, 256, "v2:4x4", ring=16, devices=2),
    "v3": TpuFamily(2, 1024, "v3:4x4", ring=32, devices=2),
    "v4": TpuFamily(3, 4096, "v4:2x2x2", chip_config="megacore"),
    "v5e": TpuFamily(2, 256, "v5e:2x4", ring=16),
    "v5p": TpuFamily(3, 6144, "v5p:4x4x4"),
    "v6e": TpuFamily(2, 256, "v6e:4x4", ring=16),
    "tpu7x": TpuFamily(3, 9216, "tpu7x:2x2x1", devices=2),
}
_FORM = re.compile(r"([a-z0-9]+):(\d{1,4}(?:x\d{1,4})*)")
_FORMS = "a topology is family:AxB or family:AxBxC, such as " + ", ".join(
    family.example for family in FAMILIES.values()
)


@dataclass(frozen=True)
class Topology:
    """A slice of a TPU family, with the shape of its torus of chips.

    A topology is always a single slice: several slices communicate through their hosts, which a
    compiled program does not show.
    """

    family: str
    shape: tuple[int, ...]


def parse_topology(text: str) -> Topology:
    """Parse a topology such as `v5e:2x4`.

    Raises:
      MeshError: the text is not a topology, the family is unknown, or the family does not have
          slices of the shape.

    >>> parse_topology("v5e:2x4")
    Topology(family='v5e', shape=(2, 4))
    """
    matched = _FORM.fullmatch(text)
    if matched is None:
        raise MeshError(f"topology {text!r} cannot be read: {_FORMS}")
    name, shape_text = matched[1], matched[2]
    if name not in FAMILIES:
        raise MeshError(
            f"topology {text!r}: there is no TPU family {name!r}: "
            f"{did_you_mean(name, FAMILIES)}; {_FORMS}"
        )
    family, shape = FAMILIES[name], tuple(int(size) for size in shape_text.split("x"))
    if len(shape) != family.dims:
        raise MeshError(
            f"topology {text!r} has {len(shape)} dims, but topologies of {name} have "
            f"{family.dims}: write it as {family.example}"
        )
    chips = math.prod(shape)
    if not 1 <= chips <= family.most_chips:
        raise MeshError(
            f"topology {text!r} has {chips:,} chips: a slice of {name} has 1 to "
            f"{family.most_chips:,}"
        )
    if not is_slice(shape):
        nearest = "x".join(map(str, _nearest(shape)))
        raise MeshError(
            f"topology {text!r} is not a slice of {name}: {_SHAPES[family.dims]}; did you mean "
            f"{name}:{nearest}?"
        )
    return Topology(name, shape)


CUBE = 4
_SHAPES = {
    2: "its dims are powers of two, none more than twice the other, as 2x4, 8x8 and 8x16",
    3: "its dims are 1, 2 or 4 chips, or all are multiples of 4 (whole cubes of 4x4x4), as 2x2x2, "
    "4x4x8 and 8x8x12",
}


def is_slice(shape: Sequence[int]) -> bool:
    """Return whether slices of a family with this number of dims can have this shape.

    A slice with three dims is a part of a cube of 4 x 4 x 4 chips, or whole cubes (Google Cloud's
    pages on TPU types and topologies, v4, v5p). A slice with two dims has a shape that Google's
    pages on v5e and v6e list, in either orientation. A pair of chips also counts as a slice, since
    libtpu can compile for it.

    >>> [is_slice(one) for one in ((8, 8, 12), (2, 2, 4), (8, 8, 9), (2, 4, 8), (8, 16), (2, 16))]
    [True, True, False, False, True, False]
    """
    if len(shape) == 2:
        powers = all(size.bit_count() == 1 for size in shape)
        return powers and max(shape) <= 2 * min(shape)
    return all(size in (1, 2, CUBE) for size in shape) or all(size % CUBE == 0 for size in shape)


def _nearest(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a slice that is close to a given shape."""
    if len(shape) == 3:
        return tuple(CUBE * max(1, round(size / CUBE)) for size in shape)
    powers = [2 ** round(math.log2(size)) for size in shape]
    return tuple(max(size, max(powers) // 2) for size in powers)


def rings(family: str, shape: Sequence[int]) -> tuple[bool, ...]:
    """Return, for each dim of a slice, whether the ends of the dim are joined to a ring.

    The difference matters, since libtpu compiles different programs for lines and for rings. For
    lines, libtpu replaces an all-gather along all dims at once by an all-reduce of shards that are
    padded with zeros.

    >>> rings("v5p", (4, 4, 8)), rings("v5p", (2, 2, 4)), rings("v5e", (8, 16))
    ((True, True, True), (False, False, False), (False, True))
    """
    known = FAMILIES.get(family)
    if known is None or known.ring is None:
        return (all(size % CUBE == 0 for size in shape),) * len(shape)
    return tuple(size == known.ring for size in shape)


def topology_devices(text: str) -> list[Any]:
    """Return the `jax.Device`s of a TPU topology such as `v5e:2x4`, for compilation only.

    The first call loads libtpu.

    Raises:
      MeshError: the text is not a topology, libtpu does not know the topology, or libtpu is not
        installed.
    """
    topology = parse_topology(text)
    if importlib.util.find_spec("libtpu") is None:
        raise MeshError(
            f"compiling for topology {text!r} needs libtpu, which is not installed: pip "
            "install 'jaxdist[tpu]'"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import jax
    from jax.experimental import topologies

    try:
        with _LOADING:
            described = topologies.get_topology_desc(
                f"{topology.family}:{'x'.join(map(str, topology.shape))}",
                "tpu",
                chip_config_name=FAMILIES[topology.family].chip_config,
                # libtpu expects three dims, even for families with two.
                wrap=(*rings(topology.family, topology.shape), False)[:3],
            )
    except jax.errors.JaxRuntimeError as error:
        raise MeshError(f"topology {text!r} is unknown to libtpu: {error}; {_FORMS}") from error
    return list(described.devices)
