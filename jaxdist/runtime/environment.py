"""The process environment that jax reads once: set here, in one place, before jax is imported.

Fake CPU devices need three settings that belong together. The device count is an XLA flag. XLA's
CPU thread pool must hold at least two threads per fake device, or collectives can wait for a device
whose matmul has no thread left (seen on jax 0.10 as an abort after 40 seconds); `NPROC` sizes it.
And a collective that waits for a lost peer must give up: the shipped default is 30 minutes.

One more is read even earlier, when the process starts. XLA's CPU backend takes the memory of its
temporaries from malloc at each step and gives it back after it, so that on Linux a training step
can spend half of its time on page faults; glibc's huge pages make them 512 times fewer. What is
larger than 32 MiB glibc would map anew each time: it is told to take it from its heap, where it is
found again, and to have one heap, because all but the first end at 64 MiB.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from jaxdist.errors import MeshError

COLLECTIVE_TIMEOUT_SECONDS = 120
THREADS_PER_FAKE_DEVICE = 2

COUNT_FLAG = "--xla_force_host_platform_device_count"
MALLOC_TUNABLES = {
    "glibc.malloc.hugetlb": "1",
    "glibc.malloc.mmap_max": "0",
    "glibc.malloc.arena_max": "1",
    "glibc.malloc.trim_threshold": str(2**31 - 1),
}
TIMEOUT_FLAGS = (
    "--xla_cpu_collective_timeout_seconds",
    "--xla_cpu_collective_call_terminate_timeout_seconds",
)


def parse_xla_flags(text: str) -> dict[str, str | None]:
    """XLA_FLAGS as a mapping; the last of two equal flags wins, as in XLA.

    >>> parse_xla_flags("--a=1 --b --a=2")
    {'--a': '2', '--b': None}
    """
    pairs = (flag.partition("=") for flag in text.split())
    return {name: value if eq else None for name, eq, value in pairs}


def format_xla_flags(flags: dict[str, str | None]) -> str:
    """The inverse of `parse_xla_flags`."""
    return " ".join(name if value is None else f"{name}={value}" for name, value in flags.items())


def plan_environment(
    environ: dict[str, str],
    *,
    fake_devices: int | None,
    collective_timeout_seconds: int = COLLECTIVE_TIMEOUT_SECONDS,
    idle_libtpu: bool = False,
) -> dict[str, str]:
    """The variables to set, given the present ones; what the user set wins where it is safe.

    `fake_devices` None leaves the device count alone (but a count already in XLA_FLAGS still gets
    the thread pool that it needs). `idle_libtpu`: as `has_idle_libtpu` says.
    """
    flags = parse_xla_flags(environ.get("XLA_FLAGS", ""))
    for name in TIMEOUT_FLAGS:
        flags.setdefault(name, str(collective_timeout_seconds))
    if fake_devices is not None:
        flags[COUNT_FLAG] = str(fake_devices)
    planned = {"XLA_FLAGS": format_xla_flags(flags)}
    count = flags.get(COUNT_FLAG)
    if count is not None and count.isdigit() and int(count) > 1:
        needed = THREADS_PER_FAKE_DEVICE * int(count)
        present = environ.get("NPROC", "")
        if not present.isdigit() or int(present) < needed:
            planned["NPROC"] = str(needed)
    if fake_devices is not None or (idle_libtpu and not environ.get("JAX_PLATFORMS")):
        planned["JAX_PLATFORMS"] = "cpu"
    return planned


def has_idle_libtpu(devices: Path = Path("/dev")) -> bool:
    """Whether libtpu is installed on a machine with neither TPU nor GPU.

    It is there to compile ahead of time; as a backend it could only print that it finds no TPU.
    """
    nodes = ("accel*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd")
    present = any(any(devices.glob(name)) for name in nodes)
    return not present and importlib.util.find_spec("libtpu") is not None


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """Installed versions by package, `python` for the interpreter's; None: not installed.

    >>> versions(["no-such-package"])
    {'no-such-package': None}
    """
    return {name: _version(name) for name in names}


def _version(name: str) -> str | None:
    from importlib import metadata  # takes as long as all else here; few commands need it

    if name == "python":
        return platform.python_version()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def prepare(*, fake_devices: int | None = None) -> None:
    """Set the environment for jax. Call it before jax is imported.

    Args:
      fake_devices: number of fake CPU devices; None uses the real ones.

    Raises:
      MeshError: jax is already imported, so that the settings would come too late.
    """
    planned = plan_environment(
        dict(os.environ), fake_devices=fake_devices, idle_libtpu=has_idle_libtpu()
    )
    changed = {name: value for name, value in planned.items() if os.environ.get(name) != value}
    if changed and "jax" in sys.modules and fake_devices is not None:
        raise MeshError(
            f"{fake_devices} fake devices were asked for after jax was imported, which is too "
            f"late: set {' '.join(f'{k}={v!r}' for k, v in changed.items())} in the environment, "
            "or call jaxdist.runtime.environment.prepare() before the first import of jax"
        )
    os.environ.update(changed)


def plan_tunables(environ: Mapping[str, str], libc: str) -> str | None:
    """The GLIBC_TUNABLES to start again with; None when that would change nothing.

    >>> plan_tunables({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc")
    'glibc.malloc.hugetlb=0:glibc.malloc.mmap_max=0:glibc.malloc.arena_max=1:glibc.malloc.trim_threshold=2147483647'
    >>> plan_tunables({}, "musl") is None
    True
    """
    if libc != "glibc":
        return None
    present = environ.get("GLIBC_TUNABLES", "")
    pairs = [pair.partition("=") for pair in present.split(":") if pair]
    given = {name: value for name, _, value in pairs}
    planned = ":".join(f"{name}={value}" for name, value in {**MALLOC_TUNABLES, **given}.items())
    return planned if planned != present else None


def restart_with_huge_pages() -> None:
    """Replace this process by itself with malloc tuned; returns only where there is nothing to do.

    For a program's entry point, before anything has happened. What the user has set wins.
    """
    planned = plan_tunables(os.environ, platform.libc_ver()[0])
    if planned is not None and sys.platform == "linux":
        environ = {**os.environ, "GLIBC_TUNABLES": planned}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a process of its own.

    The working directory is not on the child's search path. `python -m` alone puts it first, so
    that a file there named `random.py`, of this user or of any other, would be imported in place
    of Python's own. Modules that a config names by import path are found there all the same:
    `jaxdist.config.importing` adds the directory when it looks for one.

    >>> python_module("jaxdist.cli", "doctor")[1:]
    ['-P', '-m', 'jaxdist.cli', 'doctor']
    """
    return [sys.executable, "-P", "-m", module, *arguments]
