"""A query of the GPU driver for the visible devices, in the order of jax's device numbers.

`jaxdist.runtime.gpus` runs this file by its path in a separate process. The caller therefore
survives a driver that hangs or crashes, and CUDA is not initialized in a process that forks later.
The file imports only the standard library. The drivers themselves apply CUDA_VISIBLE_DEVICES,
ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, MIG and the scheduler's cgroups, so this file parses none
of them. The program prints a JSON object with `gpus`, a unique name of each GPU, and `problem`, a
text that is empty on success.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

NO_DEVICE = 100
"""The error code "no device" of both CUDA and HIP."""
LIBRARIES = {
    "cuda": ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"),
    "rocm": ("libamdhip64.so", "/opt/rocm/lib/libamdhip64.so"),
}
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class DriverError(Exception):
    """The error for an error code that a GPU driver returns."""


def _asked(library: Any, name: str, *arguments: Any) -> bool:
    """Call a function of the driver; return False if it answers that there is no device."""
    code = getattr(library, name)(*arguments)
    if code not in (0, NO_DEVICE):
        raise DriverError(f"{name} answers with error {code}")
    return code == 0


def cuda(library: Any) -> list[str]:
    """Return the UUIDs of the devices that CUDA sees.

    Raises:
      DriverError: the driver answers with an error other than "no device".
    """
    if not _asked(library, "cuInit", 0):
        return []
    count, device, found = ctypes.c_int(), ctypes.c_int(), []
    _asked(library, "cuDeviceGetCount", ctypes.byref(count))
    # Version 2 identifies an instance of a GPU that MIG splits; version 1 identifies only the GPU.
    name = "cuDeviceGetUuid_v2" if hasattr(library, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    for index in range(count.value):
        uuid = (ctypes.c_ubyte * 16)()
        _asked(library, "cuDeviceGet", ctypes.byref(device), index)
        _asked(library, name, uuid, device)
        found.append(bytes(uuid).hex())
    return found


def rocm(library: Any) -> list[str]:
    """Return a name of each device that HIP sees: the machine's boot id, PCI address and UUID.

    Raises:
      DriverError: the driver answers with an error other than "no device".
    """
    count, found = ctypes.c_int(), []
    if not _asked(library, "hipGetDeviceCount", ctypes.byref(count)):
        return []
    machine = _BOOT.read_text().strip()[:8] if _BOOT.exists() else ""
    for index in range(count.value):
        address, uuid = ctypes.create_string_buffer(32), (ctypes.c_ubyte * 16)()
        _asked(library, "hipDeviceGetPCIBusId", address, len(address), index)
        # A card in several partitions has a single PCI address, and a UUID for each partition.
        if library.hipDeviceGetUuid(uuid, index):
            uuid = (ctypes.c_ubyte * 16)()
        found.append(f"{machine}-{address.value.decode()}-{bytes(uuid).hex()}")
    return found


def query(platform: str, load: Callable[[str], Any] = ctypes.CDLL) -> dict[str, Any]:
    """Query the driver of a platform, and return the object that the program prints.

    Args:
      platform: jax's name of the platform, `cuda` or `rocm`.
      load: a function that opens a shared library by its name; it raises OSError if the library
        does not exist.
    """
    problem = ""
    for name in LIBRARIES[platform]:
        try:
            library = load(name)
        except OSError as error:
            problem = problem or f"{name} cannot be loaded: {error}"
            continue
        try:
            return {"gpus": {"cuda": cuda, "rocm": rocm}[platform](library), "problem": ""}
        except (DriverError, AttributeError) as error:
            return {"gpus": [], "problem": f"{name}: {error}"}
    return {"gpus": [], "problem": problem}


if __name__ == "__main__":
    print(json.dumps(query(sys.argv[1])))
