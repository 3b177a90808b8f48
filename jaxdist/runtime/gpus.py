"""The division of a node's visible GPUs among the processes of the node.

By default, jax takes all visible GPUs. Under Slurm or Open MPI, jax takes the GPU with the number
of the process within its node. Neither choice is right in general: several processes may see the
same GPUs, or a scheduler may have confined each process to some GPUs, which then have the numbers
0, 1, ... Every process therefore asks the driver for the identities of the GPUs that it sees,
process 0 divides the GPUs (`divide_gpus`), and each process passes its share to jax.
"""

from __future__ import annotations

import json
import pkgutil
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from jaxdist.errors import RunError
from jaxdist.runtime import gpu_query
from jaxdist.types import Json, JsonObject

QUERY_SECONDS = 120
"""The time limit of the driver's answer, in seconds; without persistence mode, the driver first
initializes every GPU."""
DRIVERS = {
    "cuda": ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg"),
    "rocm": ("/dev/kfd",),
}
"""The paths of each platform's driver; at least one exists if the kernel has the driver."""
HIDING = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
"""The variables by which a user or a scheduler deliberately hides GPUs."""
CHOICE = "JAX_LOCAL_DEVICE_IDS"
_CPU = "to run on the CPU set JAX_PLATFORMS=cpu"


@dataclass(frozen=True)
class Seen:
    """The message in which a process describes its GPUs to the other processes.

    Attributes:
      machine: the name of the process's node.
      gpus: an identity for each visible GPU, in the order in which jax numbers the GPUs.
      given: the number of GPUs that the scheduler gave the job on this node, or None if unknown.
      chosen: the numbers that the user set in JAX_LOCAL_DEVICE_IDS, or None if the variable is not
        set.
      problem: the reason why the GPUs cannot be counted, or an empty string if they were counted.
    """

    machine: str
    gpus: tuple[str, ...] = ()
    given: int | None = None
    chosen: tuple[int, ...] | None = None
    problem: str = ""

    def told(self) -> JsonObject:
        """Convert the message to plain data for JSON, with lists instead of tuples."""
        return TypeAdapter(Seen).dump_python(self, mode="json")

    @classmethod
    def read(cls, told: Json) -> Seen:
        """Read a message from the result of `told`.

        Raises:
          RunError: the data are not such a result.
        """
        try:
            values: Any = told
            whole = {field.name: values[field.name] for field in fields(cls)}
            return TypeAdapter(cls).validate_python(whole)
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"a process described its GPUs as {told!r:.200}, which cannot be read: install "
                "the same version of jaxdist on all nodes"
            ) from error


def look(environ: Mapping[str, str], platforms: str | None) -> Seen:
    """Return the GPUs that this process sees, without starting a backend of jax.

    Args:
      platforms: the setting `jax_platforms`, such as "cuda,cpu"; None or "" lets jax choose.

    Raises:
      RunError: JAX_LOCAL_DEVICE_IDS does not hold numbers, or a driver does not answer.
    """
    wanted = gpu_platforms(platforms, _plugins) if _has_driver(DRIVERS) else ()
    found: dict[str, Any] = {"gpus": [], "problem": ""}
    for one in (one for one in wanted if _has_driver([one])):
        found = _query(one)
        if not (found["gpus"] or found["problem"] or any(name in environ for name in HIDING[one])):
            found["problem"] = (
                f"the driver of {one} is loaded, but no GPU is visible: check what nvidia-smi or "
                "rocm-smi lists"
            )
        if found["gpus"]:
            break
    return Seen(
        platform.node(),
        tuple(found["gpus"]),
        gpus_given(environ),
        _chosen(environ.get(CHOICE)),
        found["problem"],
    )


def gpu_platforms(platforms: str | None, plugins: Any) -> tuple[str, ...]:
    """Return the GPU platforms that jax would try, given `jax_platforms` and installed plugins.

    Args:
      platforms: the setting `jax_platforms`, such as "cuda,cpu"; None or "" lets jax choose.
      plugins: a function that returns the names of jax's plugins; it is called only if the setting
        allows a GPU.

    >>> gpu_platforms("", lambda: ["xla_cuda12"]), gpu_platforms("cpu", lambda: ["xla_cuda12"])
    (('cuda',), ())
    """
    named = [one.strip() for one in (platforms or "").split(",") if one.strip()]
    allowed = [one for one in DRIVERS if not named or one in named or "gpu" in named]
    names = plugins() if allowed else []
    return tuple(one for one in allowed if any(one in name for name in names))


def _plugins() -> list[str]:
    """Return the names of jax's plugins, from entry points and the package `jax_plugins`."""
    names = [entry.name for entry in metadata.entry_points(group="jax_plugins")]
    try:
        import jax_plugins  # pyright: ignore[reportMissingImports]
    except ImportError:
        return names
    return names + [module.name for module in pkgutil.iter_modules(jax_plugins.__path__)]


def _has_driver(platforms: Iterable[str]) -> bool:
    return any(Path(path).exists() for one in platforms for path in DRIVERS[one])


def _query(one: str) -> dict[str, Any]:
    # With -I and -S, Python is isolated and skips site-packages, which the query does not need, so
    # that it starts sooner.
    command = [sys.executable, "-I", "-S", gpu_query.__file__, one]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise RunError(
            f"the driver of {one} on {platform.node()} did not list its GPUs within "
            f"{QUERY_SECONDS} s: check whether nvidia-smi or rocm-smi answers on that node, or "
            "restart the node"
        ) from None
    if done.returncode:
        words = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return {"gpus": [], "problem": f"the driver of {one} cannot list its GPUs: {words}"}
    return json.loads(done.stdout)


def _chosen(text: str | None) -> tuple[int, ...] | None:
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise RunError(f"{CHOICE}={text!r}: write numbers with commas between them, such as 0,1")
    return tuple(map(int, parts))


def gpus_given(environ: Mapping[str, str]) -> int | None:
    """Return the number of GPUs that the scheduler gave the job on this node, or None if unknown.

    >>> gpus_given({"SLURM_STEP_GPUS": "2,3", "SLURM_GPUS_ON_NODE": "8"}), gpus_given({})
    (2, None)
    """
    step = environ.get("SLURM_STEP_GPUS", "")
    # SLURM_GPUS_ON_NODE comes later, because a step may inherit it from the batch script, which has
    # all GPUs of the job.
    if step and all(part.isdigit() for part in step.split(",")):
        return len(step.split(","))
    for name in ("SLURM_GPUS_ON_NODE", "SKYPILOT_NUM_GPUS_PER_NODE"):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def divide_gpus(seen: Sequence[Seen]) -> list[tuple[int, ...]]:
    """Return the GPUs that each process owns, so that each GPU has exactly one owner.

    Processes that see the same GPUs share them evenly, in the order of the processes. If a process
    sees GPUs that no other process sees, it owns all of these GPUs. The user's choice by
    JAX_LOCAL_DEVICE_IDS is respected.

    Args:
      seen: the messages of all processes, in the order of the processes.

    Returns:
      The GPUs of each process, in the process's own numbering; all tuples are empty if no process
      sees a GPU.

    Raises:
      RunError: GPUs would be idle, shared, or taken from another job; the message has the numbers.

    >>> node = [Seen("n1", ("a", "b", "c", "d"))] * 2
    >>> divide_gpus(node), divide_gpus([Seen("n1", ("a",)), Seen("n1", ("b",))])
    ([(0, 1), (2, 3)], [(0,), (0,)])
    """
    for index, one in enumerate(seen):
        if one.problem:
            raise RunError(f"process {index} on {one.machine}: {one.problem}; {_request()}, {_CPU}")
    if not any(one.gpus for one in seen):
        return [()] * len(seen)
    groups: dict[frozenset[str], list[int]] = {}
    for index, one in enumerate(seen):
        if not one.gpus:
            raise RunError(
                f"process {index} on {one.machine} finds no GPU, but other processes find GPUs: "
                f"{_request()}"
            )
        groups.setdefault(frozenset(one.gpus), []).append(index)
    shares: list[tuple[int, ...]] = [()] * len(seen)
    for members in groups.values():
        for index, share in zip(members, _shares(seen, members), strict=True):
            shares[index] = share
    _check_whole(seen, shares)
    return shares


def _shares(seen: Sequence[Seen], members: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the GPUs that each process in `members` owns; these processes see the same GPUs."""
    gpus, machine = seen[members[0]].gpus, seen[members[0]].machine
    chosen = [seen[index].chosen for index in members]
    if any(one is not None for one in chosen):
        return [_checked(seen, index) for index in members]
    each, rest = divmod(len(gpus), len(members))
    if rest or not each:
        raise RunError(
            f"{len(members)} processes on {machine} ({_range(members)}) see the same {len(gpus)} "
            "GPUs and cannot share these GPUs evenly: start a number of processes that divides "
            f"{len(gpus)}, or a single process, or set {CHOICE} in each process"
        )
    shares = []
    for position, index in enumerate(members):
        mine = gpus[position * each : (position + 1) * each]
        # The numbers must be in the order of the process, which may see the same GPUs in another
        # order.
        shares.append(tuple(seen[index].gpus.index(name) for name in mine))
    return shares


def _checked(seen: Sequence[Seen], index: int) -> tuple[int, ...]:
    one = seen[index]
    if one.chosen is None:
        raise RunError(
            f"process {index} on {one.machine} has no {CHOICE}, but another process that sees the "
            f"same GPUs has {CHOICE}: set {CHOICE} in all of these processes or in none"
        )
    if max(one.chosen) >= len(one.gpus):
        raise RunError(
            f"process {index} on {one.machine}: {CHOICE}={','.join(map(str, one.chosen))}, but the "
            f"process sees {len(one.gpus)} GPUs, which are numbered from 0: write "
            "smaller numbers"
        )
    return one.chosen


def _check_whole(seen: Sequence[Seen], shares: Sequence[tuple[int, ...]]) -> None:
    """Refuse a GPU with two owners, and a node on which GPUs from the scheduler have no owner."""
    owners: dict[str, int] = {}
    for index, (one, share) in enumerate(zip(seen, shares, strict=True)):
        for number in share:
            other = owners.setdefault(one.gpus[number], index)
            if other != index or share.count(number) > 1:
                raise RunError(
                    f"processes {other} and {index} on {one.machine} would both own the GPU that "
                    f"process {index} numbers {number}. Let all processes of a node see the same "
                    "GPUs, or let each process see only its own (CUDA_VISIBLE_DEVICES), or set "
                    f"{CHOICE} in each process"
                )
    for machine in dict.fromkeys(one.machine for one in seen):
        members = [index for index, one in enumerate(seen) if one.machine == machine]
        given = max((seen[index].given or 0 for index in members), default=0)
        owned = sum(len(shares[index]) for index in members)
        chosen = any(seen[index].chosen is not None for index in members)
        if given and owned != given and not chosen:
            raise RunError(
                f"{len(members)} processes on {machine} ({_range(members)}) own {owned} "
                f"GPUs together, but the scheduler assigned {given} GPUs of {machine} to "
                f"the job. Start enough processes to use all of them, {_request()}, or set "
                f"{CHOICE} in each process"
            )


def check_started(
    who: str, own: Sequence[int], total: int, platform_name: str, local: int, found: int
) -> None:
    """Refuse a backend of jax whose devices differ from the GPUs that `divide_gpus` assigned.

    Args:
      who: the name of this process in error messages.
      own: the GPUs that this process owns; if empty, nothing is checked.
      total: the number of GPUs of all processes.
      platform_name: the platform that jax runs on.
      local: the number of jax's devices in this process.
      found: the number of jax's devices in all processes.

    Raises:
      RunError: the devices differ from the assigned GPUs; the message has the numbers.
    """
    if own and (platform_name, local, found) != ("gpu", len(own), total):
        raise RunError(
            f"{who} owns {len(own)} of {total} GPUs, but jax has started {local} of {found} "
            f"devices of the platform {platform_name}: see jax's own messages above, install jax "
            f"for this GPU and driver, or {_CPU}"
        )


def _request() -> str:
    return "ask the scheduler for GPUs on every node (Slurm: --gpus-per-node)"


def _range(members: Sequence[int]) -> str:
    return f"{members[0]} to {members[-1]}" if len(members) > 1 else f"process {members[0]}"
