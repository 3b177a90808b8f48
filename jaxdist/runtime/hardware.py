"""The figures of known devices and links, from which a program's cost is computed.

The figures are in `hardware.toml`, with their sources.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from jaxdist.errors import JaxdistError, did_you_mean

CHIPLET_LINKS = 6
"""The assumed bandwidth between the two devices of a chip, in links of the torus. With this
bandwidth, the connection is never the bottleneck."""


def host_memory_bytes() -> int:
    """Return the total memory of this machine, including memory in use."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


Topology = Literal["switch", "torus", "memory"]


@dataclass(frozen=True)
class Link:
    """The form of a network, and the latency and bandwidth of a single device in the network.

    Attributes:
      latency_seconds: the seconds from the start of a message to its first byte at the neighbor.
      bytes_per_second: the bytes per second in one direction, through one port.
      topology: the form of the network. A "switch" connects all devices, each through one port. In
        a "torus", messages travel along an axis from neighbor to neighbor, through two ports at
        once. A "memory" is shared by all devices, which are threads of one process.
    """

    latency_seconds: float
    bytes_per_second: float
    topology: Topology = "switch"

    @property
    def ports(self) -> int:
        """The number of ports through which a device can send at the same time."""
        return 2 if self.topology == "torus" else 1


@dataclass(frozen=True)
class Device:
    """The figures of a device of jax; a v4 chip (megacore) is one device.

    Attributes:
      name: the short name, for example "v5e".
      flops_per_second: the peak rate of dense matrix products, by dtype name.
      memory_bytes: the memory that a program can use, or None if the device uses the host's memory.
      memory_bytes_per_second: the bandwidth of the device's main memory.
      fast: the network within a slice or host (ICI, NVLink), per mesh axis; the devices of a chip
        share this network.
      slow: the network between slices or hosts (DCN, Ethernet, InfiniBand), per device.
      clock_hz: the clock rate of a TPU's cores, in hertz, or None for other devices. libtpu
        estimates durations in cycles of this clock.
      host_bytes_per_second: the bandwidth between the device's memory and the host's memory, in one
        direction, or None if it is unknown.
    """

    name: str
    flops_per_second: Mapping[str, float]
    memory_bytes: int | None
    memory_bytes_per_second: float
    fast: Link
    slow: Link
    clock_hz: float | None = None
    host_bytes_per_second: float | None = None


def _read() -> Iterator[Device]:
    table = tomllib.loads(Path(__file__).with_name("hardware.toml").read_text(encoding="utf-8"))
    for name, figures in table["devices"].items():
        given = {"memory_bytes": None, **figures}
        given["flops_per_second"] = MappingProxyType(given["flops_per_second"])
        for network in ("fast", "slow"):
            link = dict(given[network])
            given[network] = Link(**table["links"][link.pop("link")], **link)
        yield Device(name, **given)


DEVICES: Mapping[str, Device] = MappingProxyType({device.name: device for device in _read()})
"""The known devices by short name."""

_KINDS = (
    ("tpu v5 lite", "v5e"),
    ("tpu v5e", "v5e"),
    ("tpu v5", "v5p"),
    ("tpu v6 lite", "v6e"),
    ("tpu v6e", "v6e"),
    ("tpu v4", "v4"),
    ("tpu7x", "tpu7x"),
    ("a100", "a100"),
    ("h100", "h100"),
    ("h200", "h200"),
    ("cpu", "cpu"),
)
"""Pairs of a substring of `device_kind`, in lower case, and a short name. The first substring that
occurs counts, so more specific substrings come first."""


def find_device(kind: str) -> Device | None:
    """Return the device of a short name or of a `jax.Device.device_kind`, or None if it is unknown.

    >>> find_device("TPU v5 lite").name, find_device("NVIDIA H100 80GB HBM3").name
    ('v5e', 'h100')
    >>> find_device("TPU v4 lite") is None
    True
    """
    name = kind.strip().lower()
    if name in DEVICES:
        return DEVICES[name]
    for part, device_name in _KINDS:
        # A "lite" chip is another chip: "TPU v4 lite" is not v4.
        if part in name and "lite" not in name.replace(part, ""):
            return DEVICES[device_name]
    return None


def device(kind: str) -> Device:
    """Return the known device with this short name or `device_kind`.

    >>> device("v5e").fast.bytes_per_second
    45000000000.0

    Raises:
      JaxdistError: `kind` is unknown.
    """
    found = find_device(kind)
    if found is None:
        raise JaxdistError(f"the device kind {kind!r} is unknown: {did_you_mean(kind, DEVICES)}")
    return found
