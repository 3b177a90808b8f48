"""The driver of a job on Ray: `python -m jaxdist.launch.ray_job SETTINGS.json`.

JAX cannot replace a lost process of a group. After a loss, the driver therefore ends all actors and
starts new actors, on other nodes if necessary. The processes then resume from the newest
checkpoint. The driver does not restart the actors of servers and of the workers of `strategy.type:
parameter_server`: Ray restarts such an actor by itself, and its process joins the run again.
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
Lost = tuple[str, int | None]
"""The name of a failed process, and its exit code, or None if its actor was lost."""


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


class Restarted(Process):
    """The actor of a process that can be lost alone: Ray restarts it, and calls `run` again."""

    def run(self, command: list[str], folder: str, environ: dict[str, str]) -> int:
        code = super().run(command, folder, environ)
        if code not in (0, CONFIG_ERROR):
            os._exit(1)  # Ray restarts an actor only after the end of the actor's process.
        return code


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
        words = f"generation {generation} ended ({process}: {how})"
        print(words, flush=True)
    raise RunError(
        f"{settings['restarts']} restarts were not enough; the last failure: {words}. Read the log "
        "of that process, and allow more restarts only if its machine has failed"
    )


def _generation(settings: JsonObject) -> Lost | None:
    """Run a generation; return the first failure of a process, or None if all succeeded."""
    ray, count = _ray(), settings["nodes"] * settings["processes"]
    group = _room(settings, count)
    actors, servers = _actors(settings, count, group), _servers(settings, count, group)
    try:
        coordinator = ray.get(actors[0].address.remote())
        known = {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": str(count)}
        training: dict[Any, str] = {}
        serving: dict[Any, str] = {}
        for at, actor in enumerate(actors):
            environ = {**known, "JAX_PROCESS_ID": str(at)}
            told = actor.run.remote(settings["command"], settings["folder"], environ)
            # The job does not wait for workers besides process 0: a worker that was restarted late
            # would wait for a run that process 0 has ended.
            kind = serving if at and settings["apart"] else training
            kind[told] = f"process {at}"
        for at, server in enumerate(servers):
            # A server computes on no device, so jax need not look for any.
            given = settings["serve"]["command"], settings["folder"], {"JAX_PLATFORMS": "cpu"}
            serving[server.run.remote(*given)] = f"server {at}"
        return _first_lost(training, serving)
    finally:
        for actor in [*actors, *servers]:
            with suppress(Exception):  # The actor may be gone already.
                ray.kill(actor)
        _ray("ray.util").remove_placement_group(group)


def _first_lost(training: dict[Any, str], serving: dict[Any, str]) -> Lost | None:
    """Return the first failure, or None as soon as all processes of `training` have succeeded.

    Args:
      training: the names of the processes to wait for.
      serving: the names of the other processes, whose failures also count.
    """
    ray, waiting, left = _ray(), {**training, **serving}, {*training}
    while left:
        (done, *_), _ = ray.wait([*waiting])
        name = waiting.pop(done)
        left.discard(done)
        try:
            code = ray.get(done)
        except ray.exceptions.RayError:
            return name, None
        if code:
            return name, code
    return None


def _room(settings: JsonObject, count: int) -> Any:
    """Return a placement group that reserves resources for all processes, spread over the nodes.

    The first bundles are for the processes that train, and each further bundle is for a machine of
    servers. If the cluster has nodes without GPUs, servers run only on such nodes.

    Raises:
      RunError: the resources were not free within the time that the settings allow.
    """
    each = {"CPU": settings["cpus"], **({"GPU": settings["gpus"]} if settings["gpus"] else {})}
    wanted, serve, more = f"{each} for each of {count} processes", settings["serve"], {}
    bundles = [each] * count
    if serve:
        room = {"CPU": serve["cpus"] * serve["processes"]}
        bundles += [room] * serve["nodes"]
        wanted += f" and {room} for each of {serve['nodes']} machines for servers"
        alive = [node for node in _ray().nodes() if node["Alive"]]
        gpus = [node["NodeID"] for node in alive if node["Resources"].get("GPU")]
        if 0 < len(gpus) < len(alive):
            wanted += " (nodes without GPUs)"
            other = {"ray.io/node-id": f"!in({','.join(gpus)})"}
            more = {"bundle_label_selector": [{}] * count + [other] * serve["nodes"]}
    group = _ray("ray.util").placement_group(bundles, strategy="SPREAD", **more)
    if not group.wait(settings["wait_seconds"]):
        lower = "cpus, gpus or servers.cpus" if serve else "cpus or gpus"
        raise RunError(
            f"the resources {wanted} were not free within {settings['wait_seconds']:g} s; the "
            f"whole cluster has {_ray().cluster_resources()}: lower {lower}, or wait longer "
            "(wait_seconds)"
        )
    return group


def _actors(settings: JsonObject, count: int, group: Any) -> list[Any]:
    # With two threads, an actor can execute `stop` while `run` waits.
    first = _ray().remote(max_concurrency=2)(Process)
    others = _restarted(settings) if settings["apart"] else first
    needs = {"num_cpus": settings["cpus"], "num_gpus": settings["gpus"]}
    return [_started(others if at else first, group, at, **needs) for at in range(count)]


def _restarted(settings: JsonObject) -> Any:
    again = {"max_restarts": settings["restarts"], "max_task_retries": -1}
    return _ray().remote(max_concurrency=2, **again)(Restarted)


def _servers(settings: JsonObject, count: int, group: Any) -> list[Any]:
    """Return the actors of the servers, which run in the bundles from number `count` on."""
    serve = settings["serve"]
    if not serve:
        return []
    kind, each = _restarted(settings), serve["processes"]
    return [
        _started(kind, group, count + at // each, num_cpus=serve["cpus"])
        for at in range(serve["nodes"] * each)
    ]


def _started(kind: Any, group: Any, bundle: int, **needs: float) -> Any:
    """Start and return an actor, in a bundle of a placement group."""
    strategy = _ray("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
    placed = strategy(placement_group=group, placement_group_bundle_index=bundle)
    return kind.options(**needs, scheduling_strategy=placed).remote()


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
