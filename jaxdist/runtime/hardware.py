"""The figures of known devices and links, from which a program's cost is computed.

The peak FLOPs, memory bandwidth and links of TPUs and GPUs are from "How to Scale Your Model"
(jax-ml.github.io/scaling-book, chapters TPUs and GPUs), in which a TPU's hop takes about 1 us. The
memory of a TPU is the memory that XLA calls available when it compiles for the TPU (libtpu 0.0.42).
The memory of a GPU is from its data sheet. The clock of a TPU is the clock at which its matrix
units (four of 128 x 128 in each core of v4, v5e and v5p, four of 256 x 256 in v6e) reach the peak.
The link of a TPU to its host is PCIe, with the bandwidth in the same book. The latencies of NVLink
and of a GPU's network are from NCCL's own tuning table (`hwLat`, ring, protocol Simple). The
latency between TPU slices is assumed to equal the latency of a GPU's network.

A chip of tpu7x (Ironwood) is two devices of jax, each with half of the chip's FLOPs, memory and
network; the two devices share the chip's links. The FLOPs, memory bandwidth and network are from
Google Cloud's page "TPU7x (Ironwood)" (2307 TFLOP/s, 7380 GB/s, 100 Gbit/s per chip). The page
gives 1200 GB/s in both directions per chip for the links of tpu7x and of v5p, so the links are
assumed to be equal. The memory is from libtpu 0.0.52. The clock is the clock at which four units of
256 x 256 on each device reach the peak. The cost analysis of libtpu assumes 996 TFLOP/s per device,
which these units reach at 1.9 GHz (and 394 TFLOP/s on v5p, at 1.5 GHz). The connection of the two
devices of a chip is assumed to be as fast as the chip's six links together (`CHIPLET_LINKS`).

The figures of the CPU are measured with `jaxdist bench collectives`, on fake devices in one process
on two cores.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from jaxdist.errors import JaxdistError, did_you_mean

GIB = 2**30
CHIPLET_LINKS = 6
"""The assumed bandwidth between the two devices of a chip, in links of the torus. With this
bandwidth, the connection is never the bottleneck."""


def host_memory_bytes() -> int:
    """Return the total memory of this machine, including memory in use."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


Topology = Literal["switch", "torus", "memory"]


@dataclass(frozen=True)
class Link:
    """A network, by the figures of a single device in it.

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


def _ici(bytes_per_second: float) -> Link:
    return Link(1e-6, bytes_per_second, "torus")


def _nvlink(bytes_per_second: float) -> Link:
    return Link(3.4e-6, bytes_per_second)


def _network(bytes_per_second: float) -> Link:
    return Link(14e-6, bytes_per_second)


def _flops(**by_dtype: float) -> Mapping[str, float]:
    return MappingProxyType(by_dtype)


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device(
                "v4",
                _flops(bfloat16=2.75e14, int8=2.75e14),
                2 * int(15.25 * GIB),
                1.2e12,
                _ici(4.5e10),
                _network(6.25e9),
                1.05e9,
                1.6e10,
            ),
            Device(
                "v5e",
                _flops(bfloat16=1.97e14, int8=3.94e14),
                int(15.75 * GIB),
                8.1e11,
                _ici(4.5e10),
                _network(3.125e9),
                1.5e9,
                1.6e10,
            ),
            Device(
                "v5p",
                _flops(bfloat16=4.59e14, int8=9.18e14),
                int(95.73 * GIB),
                2.8e12,
                _ici(9e10),
                _network(6.25e9),
                1.75e9,
                1.6e10,
            ),
            Device(
                "v6e",
                _flops(bfloat16=9.2e14, int8=1.84e15),
                int(31.24 * GIB),
                1.6e12,
                _ici(9e10),
                _network(12.5e9),
                1.75e9,
                3.2e10,
            ),
            Device(
                "tpu7x",
                _flops(bfloat16=1.1535e15),
                int(94.74 * GIB),
                3.69e12,
                _ici(9e10),
                _network(6.25e9),
                2.2e9,
            ),
            Device(
                "a100",
                _flops(bfloat16=3.12e14, float16=3.12e14, int8=6.24e14, float32=1.95e13),
                80 * GIB,
                2.0e12,
                _nvlink(3e11),
                _network(25e9),
            ),
            Device(
                "h100",
                _flops(bfloat16=9.9e14, float16=9.9e14, int8=1.98e15, float32=6.7e13),
                80 * 10**9,
                3.35e12,
                _nvlink(4.5e11),
                _network(50e9),
            ),
            Device(
                "h200",
                _flops(bfloat16=9.9e14, float16=9.9e14, int8=1.98e15, float32=6.7e13),
                141 * 10**9,
                4.8e12,
                _nvlink(4.5e11),
                _network(50e9),
            ),
            Device(
                "cpu",
                _flops(float32=9e10),
                None,
                3.1e10,
                Link(2e-4, 7e8, "memory"),
                Link(3e-4, 1.25e8),
            ),
        )
    }
)
"""The known devices by short name; the slow link of the CPU is 1 Gbit/s Ethernet."""

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
    """Return the device of a short name or of a `device_kind`, which must be known.

    >>> device("v5e").fast.bytes_per_second
    45000000000.0

    Raises:
      JaxdistError: `kind` is unknown.
    """
    found = find_device(kind)
    if found is None:
        raise JaxdistError(f"the device kind {kind!r} is unknown: {did_you_mean(kind, DEVICES)}")
    return found
