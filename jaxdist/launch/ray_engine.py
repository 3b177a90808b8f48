"""The engine of Ray: an actor for each process starts it; tensors do not pass through actors."""

from __future__ import annotations

import json
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat

from jaxdist.launch.contract import Engine, Job, Rendered
from jaxdist.runtime.environment import python_module

SETTINGS = "ray.json"


class Ray(Engine):
    """The engine of a cluster of Ray, which runs anything that its users submit."""

    program: ClassVar[str] = "ray"
    install: ClassVar[str] = "pip install 'jaxdist[ray]'"
    type: Literal["ray"] = "ray"
    """Selects this engine."""
    address: str | None = None
    """HOST:PORT of the head; null starts a cluster on this machine, for this job only."""
    cpus: Annotated[float, Field(ge=0)] = 1.0
    """Number of CPUs of each process."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """Number of GPUs of each process."""
    restarts: Annotated[int, Field(ge=0)] = 20
    """Number of restarts of all processes after a loss."""
    wait_seconds: PositiveFloat = 300.0
    """Seconds to wait for room in the cluster."""
    insecure: bool = False
    """Use a cluster without a token: anybody who can reach it can run anything."""

    def render(self, job: Job) -> Rendered:
        # Actors run on Ray's nodes, with the interpreter that Ray was started with.
        program = ("-P", "-m", job.module)
        given = {
            **self.model_dump(exclude={"type"}),
            "name": job.name,
            "nodes": job.nodes,
            "processes": job.processes,
            "folder": str(job.folder),
            "command": job.train("--distributed", program=program),
        }
        text = json.dumps(given, indent=1) + "\n"
        command = tuple(python_module("jaxdist.launch.ray_job", f"{{folder}}/{SETTINGS}"))
        return Rendered({SETTINGS: text}, command, waits=True)
