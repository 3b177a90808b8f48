"""The preparation, before jax is imported, of the environment variables that jax reads once.

Fake CPU devices need three settings that belong together. The device count is an XLA flag. XLA's
CPU thread pool must have at least two threads per fake device. With fewer threads, a collective can
wait for a device whose matmul has no thread left (seen on jax 0.10 as an abort after 40 seconds);
`NPROC` sets the size of the pool. The timeout of a collective that waits for a lost peer must be
shorter than its default of 30 minutes.

glibc reads another variable even earlier, when the process starts. XLA's CPU backend allocates its
temporaries with malloc at each step and frees them afterwards. On Linux, a training step can
therefore spend half of its time on page faults; glibc's huge pages reduce the faults by a factor of
512. By default, glibc maps each block of more than 32 MiB separately. The tunables here make glibc
take such blocks from its heap, where they are reused. They also make glibc use a single heap,
because all other heaps are limited to 64 MiB.
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
    """Parse XLA_FLAGS to a mapping; if a flag occurs twice, the last value wins, as in XLA.

    >>> parse_xla_flags("--a=1 --b --a=2")
    {'--a': '2', '--b': None}
    """
    pairs = (flag.partition("=") for flag in text.split())
    return {name: value if eq else None for name, eq, value in pairs}


def format_xla_flags(flags: dict[str, str | None]) -> str:
    """Format flags as the text of XLA_FLAGS, which `parse_xla_flags` parses."""
    return " ".join(name if value is None else f"{name}={value}" for name, value in flags.items())


def plan_environment(
    environ: dict[str, str],
    *,
    fake_devices: int | None,
    collective_timeout_seconds: int = COLLECTIVE_TIMEOUT_SECONDS,
    idle_libtpu: bool = False,
) -> dict[str, str]:
    """Return the environment variables to set; the user's values are kept where that is safe.

    Args:
      environ: the current environment.
      fake_devices: the number of fake CPU devices. None leaves the device count unchanged; if
        XLA_FLAGS has a count, the thread pool is set for this count.
      collective_timeout_seconds: the timeout of collectives in seconds, unless XLA_FLAGS contains a
        timeout.
      idle_libtpu: the result of `has_idle_libtpu`.
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
        # A larger value of the user is kept, since only a lack of threads can block a collective.
        if not present.isdigit() or int(present) < needed:
            planned["NPROC"] = str(needed)
    # Without this variable, jax would try an accelerator and ignore the fake CPU devices.
    if fake_devices is not None or (idle_libtpu and not environ.get("JAX_PLATFORMS")):
        planned["JAX_PLATFORMS"] = "cpu"
    return planned


def has_idle_libtpu(devices: Path = Path("/dev")) -> bool:
    """Return whether libtpu is installed on a machine with neither TPU nor GPU.

    Such an installation of libtpu serves to compile ahead of time. As a backend, this libtpu would
    only report that there is no TPU.
    """
    nodes = ("accel*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd")
    present = any(any(devices.glob(name)) for name in nodes)
    return not present and importlib.util.find_spec("libtpu") is not None


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """Return the version of each package, or None for a package that is not installed.

    The name `python` gives the version of the interpreter.

    >>> versions(["no-such-package"])
    {'no-such-package': None}
    """
    return {name: _version(name) for name in names}


def _version(name: str) -> str | None:
    # The import of importlib.metadata is slow, and few commands need it.
    from importlib import metadata

    if name == "python":
        return platform.python_version()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def prepare(*, fake_devices: int | None = None) -> None:
    """Set the environment for jax, before jax is imported.

    Args:
      fake_devices: the number of fake CPU devices; None uses the real devices.

    Raises:
      MeshError: fake devices are requested, but jax is already imported, so the settings would come
        too late.
    """
    planned = plan_environment(
        dict(os.environ), fake_devices=fake_devices, idle_libtpu=has_idle_libtpu()
    )
    changed = {name: value for name, value in planned.items() if os.environ.get(name) != value}
    if changed and "jax" in sys.modules and fake_devices is not None:
        raise MeshError(
            f"{fake_devices} fake devices were requested after jax was imported, which is too "
            "late. Start a new Python process (in a notebook, restart the kernel), and make the "
            "request its first use of jax, or set "
            f"{' '.join((f'{k}={v!r}' for k, v in changed.items()))} in its environment"
        )
    os.environ.update(changed)


def plan_tunables(environ: Mapping[str, str], libc: str) -> str | None:
    """Return the value of GLIBC_TUNABLES for a restart, or None if a restart changes nothing.

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
    # The user's values come last, so that they take precedence.
    planned = ":".join(f"{name}={value}" for name, value in {**MALLOC_TUNABLES, **given}.items())
    return planned if planned != present else None


def restart_with_huge_pages() -> None:
    """Restart this process with a tuned malloc; return only if nothing needs to change.

    Call this function at a program's entry point, before anything else. The user's own settings
    take precedence.
    """
    planned = plan_tunables(os.environ, platform.libc_ver()[0])
    if planned is not None and sys.platform == "linux":
        environ = {**os.environ, "GLIBC_TUNABLES": planned}
        # glibc reads its tunables before `main`, so only a new program image sees them.
        # `orig_argv` keeps the interpreter's own options, which `sys.argv` lacks.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a separate process.

    The child's search path lacks the working directory. Plain `python -m` would put that directory
    first, so a file `random.py` in that directory, written by any user, would be imported instead
    of Python's own module. Python still finds modules that a config names by import path, because
    `jaxdist.config.importing` adds the directory when it searches for such a module.

    >>> python_module("jaxdist.cli", "doctor")[1:]
    ['-P', '-m', 'jaxdist.cli', 'doctor']
    """
    return [sys.executable, "-P", "-m", module, *arguments]
