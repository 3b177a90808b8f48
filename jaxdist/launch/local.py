"""The local engine, which runs `jaxdist train`, or an agent if there are several processes."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from jaxdist.errors import ConfigError
from jaxdist.launch.contract import Engine, Job, Rendered, no_servers


class Local(Engine):
    """The engine that runs a job on this machine."""

    program: ClassVar[str] = "jaxdist"
    install: ClassVar[str] = "pip install jaxdist"
    type: Literal["local"] = "local"
    """The name that selects this engine."""

    def check(self, job: Job) -> None:
        if job.nodes > 1:
            raise ConfigError(
                f"--nodes {job.nodes}: the engine local uses only one machine; use "
                "--processes-per-node, or --on slurm, mpi, ray, gke or tpu-vm"
            )
        no_servers(job, "local", "leave out --servers, and process 0 starts the servers")

    def on_one_machine(self, job: Job) -> bool:
        return True

    def render(self, job: Job, folder: Path) -> Rendered:
        several = ("--elastic", "--processes", str(job.processes)) if job.processes > 1 else ()
        return Rendered({}, job.groups(*several)[0].command, waits=True)
