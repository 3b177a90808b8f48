"""The checks of `jaxdist doctor`, as a pure function of the facts about a machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from jaxdist.doctor.facts import COMPANIONS, Folder, MachineFacts
from jaxdist.runtime.environment import (
    COUNT_FLAG,
    THREADS_PER_FAKE_DEVICE,
    TIMEOUT_FLAGS,
    parse_xla_flags,
)

Status = Literal["ok", "warning", "error"]

_GIB = 2**30
_LEAST_MEMORY_BYTES = 2 * _GIB
_LEAST_DISK_BYTES = 2 * _GIB
_LEAST_OPEN_FILES = 1024
_LONGEST_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Check:
    """The result of a check: the name of the item, its status and value, and a remedy.

    The remedy is empty if there is nothing to do.
    """

    name: str
    status: Status
    value: str
    remedy: str = ""


def _check(name: str, value: str, remedy: str = "", status: Status = "warning") -> Check:
    """Return a check whose status is ok if it has no remedy."""
    return Check(name, status if remedy else "ok", value, remedy)


def checks(facts: MachineFacts) -> list[Check]:
    """Return all checks of a machine, the most basic check first."""
    return [
        *_software(facts),
        _backend(facts),
        *_accelerator(facts),
        _memory(facts),
        _cpus(facts),
        *_fake_devices(facts),
        _xla_flags(facts),
        _timeouts(facts),
        _compilation_cache(facts),
        _cache(facts.cache),
        _open_files(facts),
        *_extras(facts),
    ]


def _software(facts: MachineFacts) -> Iterator[Check]:
    """Check the versions of Python and of packages against the requirements of jaxdist."""
    python = _versioned("python", facts.python, facts.python_range)
    # The remedy of `_versioned` is replaced, because pip cannot install Python.
    yield Check("python", python.status, python.value, python.remedy and "install Python 3.11-3.13")
    for name in COMPANIONS:
        yield _versioned(name, facts.versions[name], facts.ranges.get(name, ""))
    jax, jaxlib = facts.versions["jax"], facts.versions["jaxlib"]
    if jax and jaxlib and Version(jax).release[:3] != Version(jaxlib).release[:3]:
        remedy = f"pip install 'jax=={jax}' 'jaxlib=={jax}'"
        yield _check("jax and jaxlib", f"jax {jax} runs on jaxlib {jaxlib}", remedy)


def _versioned(name: str, version: str | None, allowed: str) -> Check:
    value, remedy = version or "not installed", f"pip install '{name}{allowed}'"
    if version and Version(version) in SpecifierSet(allowed, prereleases=True):
        remedy = ""
    elif version:
        value = f"{version}, but jaxdist needs {allowed}"
    return _check(name, value, remedy, "error")


def _backend(facts: MachineFacts) -> Check:
    backend = facts.backend
    if not backend.problem:
        kind = "" if backend.device_kind == backend.platform else f" ({backend.device_kind})"
        return Check("backend", "ok", f"{backend.device_count} x {backend.platform}{kind}")
    remedy = "run `python -c 'import jax; jax.devices()'` for the whole message"
    if "Unknown flag" in backend.problem:
        remedy = "this jaxlib does not know the flag: remove it from XLA_FLAGS"
    elif facts.planned.get("JAX_PLATFORMS"):
        remedy = f"JAX_PLATFORMS is {facts.planned['JAX_PLATFORMS']!r}: unset it, or set it to cpu"
    return Check("backend", "error", backend.problem, remedy)


def _accelerator(facts: MachineFacts) -> Iterator[Check]:
    """Check that jax does not run on the CPU by default although there is a GPU."""
    wants_cpu = facts.planned.get("JAX_PLATFORMS", "").lower() == "cpu"
    if facts.nvidia_driver and facts.backend.platform == "cpu" and not wants_cpu:
        remedy = "pip install 'jax[cuda13]' (cuda12 for drivers before 580)"
        yield _check("accelerator", "an NVIDIA driver is loaded, but jax runs on the CPU", remedy)


def _memory(facts: MachineFacts) -> Check:
    on_device = facts.backend.device_memory_bytes
    device = f"; {_gib(on_device)} per device" if on_device else ""
    if facts.memory_bytes is None or facts.available_bytes is None:
        return Check("memory", "ok", f"the size of the host's memory is unknown{device}")
    value = f"{_gib(facts.available_bytes)} free of {_gib(facts.memory_bytes)} on the host{device}"
    few = facts.available_bytes < _LEAST_MEMORY_BYTES
    return _check("memory", value, "end other programs, or train a smaller model" if few else "")


def _cpus(facts: MachineFacts) -> Check:
    quota = facts.cpu_quota
    if quota is None or quota >= facts.cpus:
        return Check("cpus", "ok", str(facts.cpus))
    value = f"{facts.cpus} visible, but the container may use {quota:g}"
    if facts.planned.get("NPROC", "").isdigit():
        return Check("cpus", "ok", f"{value}; NPROC is {facts.planned['NPROC']}")
    remedy = f"export NPROC={max(round(quota), 1)}, or XLA starts a thread for each visible CPU"
    return _check("cpus", value, remedy)


def _fake_devices(facts: MachineFacts) -> Iterator[Check]:
    count = parse_xla_flags(facts.planned.get("XLA_FLAGS", "")).get(COUNT_FLAG)
    if count is None:
        return
    if not count.isdigit():
        remedy = f"give a whole number: XLA_FLAGS={COUNT_FLAG}=8"
        yield _check("fake devices", f"{COUNT_FLAG}={count}", remedy, "error")
        return
    needed = THREADS_PER_FAKE_DEVICE * int(count)
    set_by_user = COUNT_FLAG in parse_xla_flags(facts.environ.get("XLA_FLAGS", ""))
    present = facts.environ.get("NPROC", "")
    if set_by_user and int(count) > 1 and not (present.isdigit() and int(present) >= needed):
        yield _check(
            "fake devices",
            f"XLA_FLAGS requests {count} devices, but NPROC is {present or 'not set'}",
            f"jaxdist commands set NPROC; before scripts of your own run export NPROC={needed}, or "
            "collectives can deadlock",
        )
    else:
        yield Check("fake devices", "ok", f"{count}, NPROC {facts.planned.get('NPROC', 'not set')}")


def _xla_flags(facts: MachineFacts) -> Check:
    text = facts.environ.get("XLA_FLAGS", "")
    values: dict[str, set[str]] = {}
    for flag in text.split():
        values.setdefault(flag.partition("=")[0], set()).add(flag)
    twice = sorted(name for name, flags in values.items() if len(flags) > 1)
    if not twice:
        return _check("XLA_FLAGS", text or "not set")
    value = "; ".join(" and ".join(sorted(values[name])) for name in twice)
    remedy = "only the last of these flags has an effect: remove the other flags"
    return _check("XLA_FLAGS", value, remedy)


def _timeouts(facts: MachineFacts) -> Check:
    flags = parse_xla_flags(facts.planned.get("XLA_FLAGS", ""))
    given = {name: flags.get(name) or "" for name in TIMEOUT_FLAGS}
    shown = ", ".join(f"{name.removeprefix('--')}={value}" for name, value in given.items())
    broken = [name for name, value in given.items() if not value.isdigit()]
    if broken:
        remedy = (
            f"set {broken[0]} to whole seconds in XLA_FLAGS, or the loss of another process hangs "
            "the run"
        )
        return _check("collective timeout", shown, remedy)
    seconds = max(int(value) for value in given.values())
    if seconds > _LONGEST_TIMEOUT_SECONDS:
        remedy = f"set both flags to at most {_LONGEST_TIMEOUT_SECONDS} in XLA_FLAGS"
        value = f"the loss of another process is noticed only after {seconds} s"
        return _check("collective timeout", value, remedy)
    return _check("collective timeout", f"{seconds} s")


def _compilation_cache(facts: MachineFacts) -> Check:
    name, folder = "compilation cache", facts.compilation_cache
    if folder is None:
        address = facts.planned.get("JAX_COMPILATION_CACHE_DIR")
        return _check(name, address or "runs keep their programs in the jaxdist cache")
    value, remedy = f"{folder.path}, {_gib(folder.free_bytes)} free", ""
    if not folder.writable:
        value = f"{folder.path} cannot be written"
        remedy = "make it writable, or set JAX_COMPILATION_CACHE_DIR to another folder"
    elif not folder.exists:
        value, remedy = f"{folder.path} does not exist", f"mkdir -m 700 -p {folder.path}"
    elif folder.mode is not None and folder.mode & 0o077:
        value = f"{folder.path} has mode {folder.mode:04o}"
        remedy = (
            "use a folder of mode 0700: anyone who can write there can run code in your processes"
        )
    return _check(name, value, remedy)


def _cache(folder: Folder) -> Check:
    value, remedy = f"{folder.path}, {_gib(folder.free_bytes)} free", ""
    if not folder.writable:
        value = f"{folder.path} cannot be written"
        remedy = "make it writable, or set JAXDIST_CACHE to another folder"
    elif folder.free_bytes < _LEAST_DISK_BYTES:
        remedy = "free some space, or set JAXDIST_CACHE to a folder on a larger disk"
    return _check("jaxdist cache", value, remedy)


def _open_files(facts: MachineFacts) -> Check:
    value = f"at most {facts.open_files}" if facts.open_files >= 0 else "no limit"
    few = 0 <= facts.open_files < _LEAST_OPEN_FILES
    remedy = "ulimit -n 4096: checkpoints open many files" if few else ""
    return _check("open files", value, remedy)


def _extras(facts: MachineFacts) -> Iterator[Check]:
    """Check the optional packages.

    A missing package has the status ok, with the command that installs it as the remedy.
    """
    ways = {
        "scikit-learn": "pip install 'jaxdist[images]' for the handwritten digits",
        "libtpu": "pip install 'jaxdist[tpu]' for TPUs and for compiling towards them",
        "tensorboard": "pip install tensorboard to look at the events that runs write",
    }
    for name, way in ways.items():
        version = facts.versions[name]
        yield Check(name, "ok", version or "not installed (optional)", "" if version else way)
    value = "found" if facts.fashion_mnist else "not found (optional)"
    way = "" if facts.fashion_mnist else "apt install dataset-fashion-mnist, or let a run fetch it"
    yield Check("fashion-mnist", "ok", value, way)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"
