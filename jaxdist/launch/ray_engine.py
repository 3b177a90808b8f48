"""The engine of Ray, in which an actor starts each process; tensors do not pass through actors."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat

from jaxdist.config.schema import Config
from jaxdist.launch.contract import Engine, Job, Rendered
from jaxdist.runtime.environment import python_module

SETTINGS = "ray.json"


class RayServers(Config):
    """The settings of parameter servers that run on separate nodes."""

    cpus: PositiveFloat = 1.0
    """The number of CPUs of each server."""


class Ray(Engine):
    """The engine of a Ray cluster, on which users can run any program."""

    program: ClassVar[str] = "ray"
    install: ClassVar[str] = "pip install 'jaxdist[ray]'"
    type: Literal["ray"] = "ray"
    """The name that selects this engine."""
    address: str | None = None
    """The HOST:PORT of the cluster's head; null starts a cluster on this machine for this job."""
    cpus: Annotated[float, Field(ge=0)] = 1.0
    """The number of CPUs of each process."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """The number of GPUs of each process."""
    servers: RayServers = RayServers()
    """The servers of `--servers`, which run on nodes without GPUs if the cluster has any."""
    restarts: Annotated[int, Field(ge=0)] = 20
    """The number of restarts of all processes after the loss of a process, and of each server
    before its loss ends a generation of processes."""
    wait_seconds: PositiveFloat = 300.0
    """The time to wait for free CPUs and GPUs in the cluster, in seconds."""
    insecure: bool = False
    """Whether to accept a cluster without a token, on which anybody who can reach the cluster can
    run any program."""

    def on_one_machine(self, job: Job) -> bool:
        return self.address is None

    def render(self, job: Job, folder: Path) -> Rendered:
        # The command lacks the interpreter, because each actor adds the interpreter of the node on
        # which it runs.
        program = ("-P", "-m", job.module)
        train, *serve = job.groups("--distributed", program=program)
        given = {
            **self.model_dump(exclude={"type", "servers"}),
            "name": job.name,
            "nodes": job.nodes,
            "processes": job.processes,
            "folder": str(job.folder),
            "command": train.command,
            "apart": job.apart,
            "serve": {**asdict(serve[0]), "cpus": self.servers.cpus} if serve else None,
        }
        text = json.dumps(given, indent=1) + "\n"
        command = tuple(python_module("jaxdist.launch.ray_job", str(folder / SETTINGS)))
        return Rendered({SETTINGS: text}, command, waits=True)
