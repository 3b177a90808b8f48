"""The connection to other processes: joining them, dividing GPUs, stopping and failing together."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxdist.errors import RunError
from jaxdist.runtime import gpus
from jaxdist.runtime.last_words import REMEDY, StandardError, meaning
from jaxdist.runtime.processes import Processes
from jaxdist.runtime.rendezvous import JOIN_SECONDS, meet
from jaxdist.types import Json


def _bind_address(coordinator: str) -> str | None:
    """Return a loopback address to listen on if the coordinator's address is loopback, else None.

    By default jax listens on all addresses.
    """
    host, _, port = coordinator.rpartition(":")
    try:
        local = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        local = host == "localhost"
    return f"{'127.0.0.1' if host == 'localhost' else host}:{port}" if local else None


@contextmanager
def connected(
    processes: Processes | None,
    report: Callable[[BaseException], int],
    *,
    seconds: int = JOIN_SECONDS,
    say: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Join the other processes for the `with` block; do nothing in a process without peers.

    Within the block, jax handles SIGTERM as its preemption notice: call `preempted` at each step.
    An error ends the process at once, because jax would otherwise wait for lost peers, or for peers
    that wait for this process.

    Args:
      processes: the position of this process among its peers, or None for a process without peers.
      report: a function that reports an error and returns the exit code.
      seconds: the time to wait for the other processes, in seconds.
      say: a function that receives a line from time to time while processes are missing; None
        prints the line.

    Raises:
      RunError: the peers cannot be joined (the message names missing peers, or jax's reason), or
        some GPU of a node does not have exactly one owner.
    """
    if processes is None:
        yield
        return
    words = StandardError(_who(processes.index, processes.count), processes.coordinator)
    try:
        _connect(processes, seconds, say or _print)
        yield
    except BaseException as error:
        code = report(_lost_peer(error, processes) or error)
        sys.stdout.flush()
        words.close()
        # `sys.exit` would run jax's exit handlers. These handlers wait for the other processes,
        # which may wait for this process.
        os._exit(code)


def _print(line: str) -> None:
    print(line, flush=True)


def _who(index: int, count: int) -> str:
    return f"process {index} of {count}"


def _lost_peer(error: BaseException, processes: Processes) -> RunError | None:
    """Return an error for the user if jax reports a lost peer, or None for any other error.

    jax reports a lost peer as the error of a collective. During the start of the devices, jax
    wraps the error of the lost connection in a `RuntimeError` ("Unable to initialize backend").
    """
    wrapped = error.__context__ if type(error) is RuntimeError else error
    if not isinstance(wrapped, jax.errors.JaxRuntimeError):
        return None
    # The index comes from `processes`: `jax.process_index` would start the devices once more.
    who = _who(processes.index, processes.count)
    why = meaning(str(wrapped), processes.coordinator)
    return RunError(f"{who} cannot continue: {why}. {REMEDY}")


def _connect(processes: Processes, seconds: int, say: Callable[[str], None]) -> None:
    coordinator, count, index = processes.coordinator, processes.count, processes.index
    try:
        bind = _bind_address(coordinator)
        everywhere = f"[::]:{coordinator.rpartition(':')[2]}"
        listen = bind or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", everywhere)
        config: Any = jax.config
        seen = gpus.look(os.environ, config.jax_platforms)
        share: Any = meet(
            coordinator,
            count,
            index,
            bind=listen,
            seconds=seconds,
            say=say,
            told=seen.told(),
            decide=_decide,
        )
        jax.distributed.initialize(
            coordinator,
            count,
            index,
            coordinator_bind_address=bind,
            # Without GPUs the list is empty, and None leaves the choice of devices to jax.
            local_device_ids=share["own"] or None,
            # If jax detected the scheduler itself, it would use a single GPU in each process under
            # Slurm or Open MPI.
            cluster_detection_method="deactivate",
            initialization_timeout=seconds,
        )
    except RunError:
        raise
    except (ValueError, RuntimeError) as error:
        raise RunError(
            f"cannot join the other processes: {error}. Read the messages of all processes, then "
            "start all of them again"
        ) from error
    if share["own"]:
        local, found = jax.local_device_count(), jax.device_count()
        backend, who = jax.default_backend(), _who(index, count)
        gpus.check_started(who, share["own"], share["total"], backend, local, found)


def _decide(told: Sequence[Json]) -> list[Json]:
    shares = gpus.divide_gpus([gpus.Seen.read(one) for one in told])
    total = sum(map(len, shares))
    return [{"own": [*share], "total": total} for share in shares]


def preempted(step: int) -> bool:
    """Return whether all processes stop after `step`, because a process has received SIGTERM."""
    return multihost_utils.reached_preemption_sync_point(step)
