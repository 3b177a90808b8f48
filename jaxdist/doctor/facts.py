"""The facts about a machine that `jaxdist doctor` reads, and on which its checks are based."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from jaxdist.data.cache import cache_directory
from jaxdist.data.images.fashion_mnist import candidate_folders, find_folder
from jaxdist.runtime import environment

COMPANIONS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "chex", "numpy")
EXTRAS = ("scikit-learn", "libtpu", "tensorboard")
PROBE_TIMEOUT_SECONDS = 120

_PROBE = """
import json, jax
devices = jax.devices()
(jax.numpy.ones(()) + 1).block_until_ready()
stats = devices[0].memory_stats() or {}
print(json.dumps({
    "platform": jax.default_backend(),
    "device_count": len(devices),
    "device_kind": devices[0].device_kind,
    "device_memory_bytes": stats.get("bytes_limit"),
}))
"""


@dataclass(frozen=True)
class Backend:
    """The devices that jax finds when it starts, or the `problem` that keeps jax from starting."""

    platform: str = ""
    device_count: int = 0
    device_kind: str = ""
    device_memory_bytes: int | None = None
    problem: str = ""


@dataclass(frozen=True)
class Folder:
    """The facts about a directory.

    If the directory does not exist, `writable` and `free_bytes` describe its nearest parent that
    exists.
    """

    path: str
    exists: bool
    writable: bool
    mode: int | None
    free_bytes: int


@dataclass(frozen=True)
class MachineFacts:
    """The facts about a machine on which all checks are based, as plain data.

    Attributes:
      python: the version of the Python interpreter.
      python_range: the versions of Python that this jaxdist supports.
      versions: the version of each package, or None for a package that is not installed.
      ranges: the versions that this jaxdist supports, for each package that it requires.
      backend: the devices that jax finds when it starts in the environment `planned`.
      environ: the environment variables that the user has set.
      planned: the environment variables with which a jaxdist command runs.
      cpus: the number of CPUs that this process may use.
      cpu_quota: the container's limit on CPU time, as a number of CPUs, or None without a limit.
      memory_bytes, available_bytes: the total and the free memory of the host, or None if unknown.
      open_files: the number of files that this process may open.
      compilation_cache: the folder of jax's persistent compilation cache, or None if no folder is
        set.
      cache: the folder for derived and downloaded data.
      nvidia_driver: whether the NVIDIA driver's tools are installed.
      fashion_mnist: whether the data set Fashion-MNIST is on this machine.
    """

    python: str
    python_range: str
    versions: Mapping[str, str | None]
    ranges: Mapping[str, str]
    backend: Backend
    environ: Mapping[str, str]
    planned: Mapping[str, str]
    cpus: int
    cpu_quota: float | None
    memory_bytes: int | None
    available_bytes: int | None
    open_files: int
    compilation_cache: Folder | None
    cache: Folder
    nvidia_driver: bool
    fashion_mnist: bool


def gather_facts(devices: int | None = None) -> MachineFacts:
    """Return the facts about this machine, for a run on its devices or on fake CPU devices.

    Args:
      devices: the number of fake CPU devices; None uses the real devices.
    """
    environ = dict(os.environ)
    planned = environ | environment.plan_environment(environ, fake_devices=devices)
    python_range, ranges = _own_requirements()
    total, available = _host_memory()
    compilation_cache = planned.get("JAX_COMPILATION_CACHE_DIR", "")
    # A cache with an address such as gs://NAME is in a bucket and not on a disk.
    on_disk = compilation_cache and "://" not in compilation_cache
    return MachineFacts(
        python=".".join(map(str, sys.version_info[:3])),
        python_range=python_range,
        versions=environment.versions((*COMPANIONS, *EXTRAS)),
        ranges=ranges,
        backend=probe_backend(planned),
        environ=environ,
        planned=planned,
        cpus=_cpus(),
        cpu_quota=_cpu_quota(Path("/sys/fs/cgroup")),
        memory_bytes=total,
        available_bytes=available,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        compilation_cache=look_at(Path(compilation_cache)) if on_disk else None,
        cache=look_at(cache_directory(environ)),
        nvidia_driver=shutil.which("nvidia-smi") is not None,
        fashion_mnist=find_folder(candidate_folders(environ)) is not None,
    )


def probe_backend(
    environ: Mapping[str, str], timeout_seconds: float = PROBE_TIMEOUT_SECONDS
) -> Backend:
    """Start jax in a separate process, and return the devices that it finds.

    If the process crashes or does not end in time, the `problem` of the result describes the
    failure.
    """
    command = [sys.executable, "-P", "-c", _PROBE]
    try:
        done = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, timeout=timeout_seconds
        )
    except subprocess.TimeoutExpired:
        return Backend(problem=f"jax gave no answer within {timeout_seconds:g} s")
    if done.returncode:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        unknown = [line for line in done.stderr.splitlines() if "Unknown flag" in line]
        return Backend(problem=unknown[0].partition("] ")[2] if unknown else last)
    # The result of the probe is the last line, since libraries may have printed before it.
    return Backend(**json.loads(done.stdout.splitlines()[-1]))


def look_at(path: Path) -> Folder:
    """Return the facts about a folder, or about the nearest parent that exists."""
    present = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    exists = path.exists()
    return Folder(
        path=str(path),
        exists=exists,
        writable=present.is_dir() and os.access(present, os.W_OK | os.X_OK),
        mode=stat.S_IMODE(path.stat().st_mode) if exists else None,
        free_bytes=shutil.disk_usage(present).free,
    )


def _own_requirements() -> tuple[str, dict[str, str]]:
    """Return the versions of Python and of packages that the installed jaxdist requires.

    Both results are empty if jaxdist is not installed as a package.
    """
    try:
        own = importlib.metadata.metadata("jaxdist")
    except importlib.metadata.PackageNotFoundError:
        return "", {}
    requirements = [Requirement(text) for text in own.get_all("Requires-Dist") or []]
    # A requirement with a marker belongs to an extra and is therefore optional.
    ranges = {r.name: str(r.specifier) for r in requirements if r.marker is None}
    return own["Requires-Python"] or "", ranges


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_quota(cgroup: Path) -> float | None:
    """Return the container's limit on CPU time as a number of CPUs, or None without a limit.

    The limit is read from the control groups, of version 2 or 1.
    """
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = (
                (cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # The file does not exist, or the quota is "max".
        return None


def _host_memory() -> tuple[int | None, int | None]:
    """Return the host's total memory, and the memory that is available without swapping, in bytes.

    A value is None if it is unknown.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None, None
    kibibytes = {name: int(rest.split()[0]) for name, _, rest in (s.partition(":") for s in lines)}
    return kibibytes["MemTotal"] * 1024, kibibytes["MemAvailable"] * 1024
