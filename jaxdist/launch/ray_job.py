"""The driver of a job on Ray: `python -m jaxdist.launch.ray_job SETTINGS.json`.

JAX cannot replace a lost process of a group. After a loss, the driver therefore ends all actors and
starts new actors, on other nodes if necessary. The processes then resume from the newest
checkpoint.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxdist.errors import JaxdistError, RunError
from jaxdist.runtime.environment import python_module
from jaxdist.types import JsonObject

CONFIG_ERROR = 2
CONNECT_SECONDS = 20
Lost = tuple[int, int | None]
"""The number of a failed process, and its exit code, or None if its actor was lost."""


def _ray(module: str = "ray") -> Any:
    """Import and return a module of ray, an optional package whose import takes seconds."""
    return importlib.import_module(module)


class Process:
    """The actor that starts a process of the run on its node."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """Return the HOST:PORT of a free port on the actor's node."""
        from jaxdist.runtime.rendezvous import free_port

        return f"{_ray('ray.util').get_node_ip_address()}:{free_port()}"

    def run(self, command: list[str], folder: str, environ: dict[str, str]) -> int:
        """Start a process that ends with this actor, wait for it, and return its exit code."""
        tied = python_module("jaxdist.launch.tied", sys.executable, *command)
        given = {**os.environ, **environ}
        self._child = subprocess.Popen(tied, stdin=subprocess.PIPE, cwd=folder, env=given)
        return self._child.wait()

    def stop(self) -> None:
        """Send SIGTERM to the process, which then saves and stops."""
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM)


def connect(settings: JsonObject) -> None:
    """Connect to the cluster that the settings name, or start a cluster on this machine.

    Raises:
      RunError: the cluster cannot be reached, or it requires no token and the setting `insecure` is
        off.
    """
    address = settings["address"]
    if address is None:
        os.environ["RAY_AUTH_MODE"] = "token"  # Ray reads this variable when it is imported.
        _ray().init(address="local", include_dashboard=False, log_to_driver=True)
        return
    if os.environ.get("RAY_AUTH_MODE") != "token" and not settings["insecure"]:
        raise RunError(
            f"the cluster at {address} does not require a token: start the cluster with "
            "RAY_AUTH_MODE=token and set the token on this host, or set insecure=true"
        )
    host, _, port = address.rpartition(":")
    try:  # Without this check, Ray would try for minutes to connect.
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise RunError(
            f"cannot connect to Ray at {address}: {error}; use HOST:PORT of the head node"
        ) from error
    _ray().init(address=address, log_to_driver=True)


def run_generations(settings: JsonObject) -> int:
    """Run one generation after another, and return the exit code of the run.

    Raises:
      RunError: the cluster has too few free resources, or too many generations failed.
    """
    connect(settings)
    words = ""
    for generation in range(1, settings["restarts"] + 2):
        lost = _generation(settings)
        if lost is None:
            return 0
        process, code = lost
        # A restart cannot help if the configuration is wrong.
        if code == CONFIG_ERROR:
            return CONFIG_ERROR
        how = "its actor was lost" if code is None else f"exit code {code}"
        words = f"generation {generation} ended (process {process}: {how})"
        print(words, flush=True)
    raise RunError(
        f"{settings['restarts']} restarts were not enough; the last failure: {words}. Read the log "
        "of that process, and allow more restarts only if its machine has failed"
    )


def _generation(settings: JsonObject) -> Lost | None:
    """Run a generation; return the first failure of a process, or None if all succeeded."""
    ray, count = _ray(), settings["nodes"] * settings["processes"]
    group = _room(settings, count)
    actors = _actors(settings, count, group)
    try:
        coordinator = ray.get(actors[0].address.remote())
        known = {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": str(count)}
        waiting: dict[Any, int] = {}
        for at, actor in enumerate(actors):
            environ = {**known, "JAX_PROCESS_ID": str(at)}
            told = actor.run.remote(settings["command"], settings["folder"], environ)
            waiting[told] = at
        return _first_lost(waiting)
    finally:
        for actor in actors:
            with suppress(Exception):  # The actor may be gone already.
                ray.kill(actor)
        _ray("ray.util").remove_placement_group(group)


def _first_lost(waiting: dict[Any, int]) -> Lost | None:
    ray = _ray()
    while waiting:
        (done, *_), _ = ray.wait([*waiting])
        at = waiting.pop(done)
        try:
            code = ray.get(done)
        except ray.exceptions.RayError:
            return at, None
        if code:
            return at, code
    return None


def _room(settings: JsonObject, count: int) -> Any:
    """Return a placement group that reserves resources for all processes, spread over the nodes.

    Raises:
      RunError: the resources were not free within the time that the settings allow.
    """
    each = {"CPU": settings["cpus"], **({"GPU": settings["gpus"]} if settings["gpus"] else {})}
    group = _ray("ray.util").placement_group([each] * count, strategy="SPREAD")
    if not group.wait(settings["wait_seconds"]):
        raise RunError(
            f"the resources {each} for each of {count} processes were not free within "
            f"{settings['wait_seconds']:g} s; the whole cluster has {_ray().cluster_resources()}: "
            "lower cpus or gpus, or wait longer (wait_seconds)"
        )
    return group


def _actors(settings: JsonObject, count: int, group: Any) -> list[Any]:
    strategy = _ray("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
    # With two threads, an actor can execute `stop` while `run` waits.
    remote = _ray().remote(max_concurrency=2)(Process)
    return [
        remote.options(
            num_cpus=settings["cpus"],
            num_gpus=settings["gpus"],
            scheduling_strategy=strategy(placement_group=group, placement_group_bundle_index=at),
        ).remote()
        for at in range(count)
    ]


def main(path: str) -> int:
    """Run the job of a settings file, and return the exit code."""
    if importlib.util.find_spec("ray") is None:
        print("error: ray is not installed: pip install 'jaxdist[ray]'", file=sys.stderr)
        return CONFIG_ERROR
    try:
        return run_generations(json.loads(Path(path).read_text()))
    except JaxdistError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
