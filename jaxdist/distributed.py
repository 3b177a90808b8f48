"""Several processes as one program: who they are, and how they agree to stop."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import jax
from jax.experimental import multihost_utils

from jaxdist.errors import RunError

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


@dataclass(frozen=True)
class Processes:
    """This process among its peers; all None leaves it to jax to find out from the cluster."""

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None


def find_processes(
    environ: Mapping[str, str],
    *,
    coordinator: str | None = None,
    count: int | None = None,
    index: int | None = None,
    detect: bool = False,
) -> Processes | None:
    """From flags, else environment variables, who this process is; None when it is alone.

    >>> find_processes({}, coordinator="host:1234", count=2, index=0)
    Processes(coordinator='host:1234', count=2, index=0)
    >>> find_processes({}) is None
    True

    Args:
      detect: let jax ask the cluster (Slurm, Open MPI, Kubernetes, TPU pods).

    Raises:
      RunError: some of the three are given but not all, or they contradict each other.
    """
    given = dict(zip(_VARIABLES, (coordinator, count, index), strict=True))
    for name in _VARIABLES:
        if given[name] is None and name in environ:
            given[name] = environ[name]
    missing = [name for name in _VARIABLES if given[name] is None]
    if len(missing) == len(_VARIABLES):
        return Processes() if detect else None
    if missing:
        flags = "--coordinator HOST:PORT --num-processes N --process-id I"
        raise RunError(f"several processes need all of {flags}; missing: {', '.join(missing)}")
    address, number, position = (str(given[name]) for name in _VARIABLES)
    if not (number.isdigit() and position.isdigit() and int(position) < int(number)):
        raise RunError(f"process id {position} of {number} processes: need 0 <= id < processes")
    if not address.rpartition(":")[2].isdigit():
        raise RunError(f"coordinator {address!r} is not HOST:PORT")
    return Processes(address, int(number), int(position))


def _bind_address(coordinator: str) -> str | None:
    """Listen on loopback only when the coordinator's address is loopback (jax listens on all)."""
    host, _, port = coordinator.rpartition(":")
    try:
        local = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        local = host == "localhost"
    return f"{'127.0.0.1' if host == 'localhost' else host}:{port}" if local else None


@contextmanager
def connected(
    processes: Processes | None, report: Callable[[BaseException], int]
) -> Iterator[None]:
    """Join the peers; does nothing for a process that is alone.

    Inside jax takes SIGTERM for its preemption notice: ask `preempted` at each step. An error ends
    the process at once, because jax would wait for peers that are lost, or that wait for us.

    Args:
      report: says what went wrong and returns the exit code.

    Raises:
      RunError: the peers cannot be joined, with jax's reason.
    """
    if processes is None:
        yield
        return
    _connect(processes)
    try:
        yield
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            error = _lost(error)
        code = report(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _lost(error: BaseException) -> RunError:
    return RunError(
        f"process {jax.process_index()} of {jax.process_count()} cannot go on: "
        f"{str(error).splitlines()[0]}. When one process is lost all end: see what the others "
        "say, then start all of them again with --resume"
    )


def _connect(processes: Processes) -> None:
    try:
        if processes.coordinator is None:
            jax.distributed.initialize()
        else:
            jax.distributed.initialize(
                processes.coordinator,
                processes.count,
                processes.index,
                coordinator_bind_address=_bind_address(processes.coordinator),
            )
    except (ValueError, RuntimeError) as error:
        raise RunError(f"cannot join the other processes: {error}") from error


def preempted(step: int) -> bool:
    """Whether to stop after `step`, decided alike by all processes once one got a SIGTERM."""
    return multihost_utils.reached_preemption_sync_point(step)
