"""Actors of Ray, one for each process: they start it, and no tensor goes through them."""

from __future__ import annotations

import json
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat

from jaxdist.launch.contract import Engine, Job, Rendered
from jaxdist.runtime.environment import python_module

SETTINGS = "ray.json"


class Ray(Engine):
    """A cluster of Ray; what is started there is its user's to trust."""

    program: ClassVar[str] = "ray"
    install: ClassVar[str] = "pip install 'jaxdist[ray]'"
    type: Literal["ray"] = "ray"
    """Selects this engine."""
    address: str | None = None
    """HOST:PORT of the head; null begins a cluster of this machine, for this job alone."""
    cpus: Annotated[float, Field(ge=0)] = 1.0
    """Of each process."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """Of each process."""
    restarts: Annotated[int, Field(ge=0)] = 20
    """Of all processes, after one was lost."""
    wait_seconds: PositiveFloat = 300.0
    """For the cluster to have room."""
    insecure: bool = False
    """Use a cluster that asks for no token: whoever reaches it runs what they like."""

    def render(self, job: Job) -> Rendered:
        # Actors run where Ray does, with the interpreter that it was started with.
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
