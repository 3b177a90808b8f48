"""The engine of mpirun, from Open MPI 4 and 5."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxdist.config.schema import Count
from jaxdist.errors import ConfigError
from jaxdist.launch.contract import Engine, Job, Rendered


class Mpi(Engine):
    """The engine of mpirun, which numbers processes by node, so that mesh neighbors are close."""

    program: ClassVar[str] = "mpirun"
    install: ClassVar[str] = "install Open MPI (openmpi-bin)"
    type: Literal["mpi"] = "mpi"
    """The name that selects this engine."""
    hosts: tuple[str, ...] = ()
    """The names of the nodes, with the node of process 0 first; an empty list uses the nodes of the
    scheduler or, without a scheduler, this machine.
    """
    port: Count | None = None
    """The port of process 0; null derives the port from the number of mpirun's job."""
    export: tuple[str, ...] = ("XLA_FLAGS", "JAXDIST_CACHE", "PATH")
    """The environment variables of this shell that processes on other nodes also receive."""
    as_root: bool = False
    """Whether root may run mpirun, which is necessary in some containers."""

    def check(self, job: Job) -> None:
        if self.hosts and len(self.hosts) != job.nodes:
            raise ConfigError(
                f"hosts: {len(self.hosts)} names for --nodes {job.nodes}: give a name for each node"
            )

    def render(self, job: Job) -> Rendered:
        each = f"ppr:{job.processes}:node:OVERSUBSCRIBE"
        command = ["mpirun", "-n", str(job.count), "--map-by", each, "--bind-to", "none"]
        if self.as_root:
            command.append("--allow-run-as-root")
        if self.hosts:
            command += ["--host", ",".join(f"{host}:{job.processes}" for host in self.hosts)]
        for name in self.export:
            command += ["-x", name]
        if self.port is not None:
            command += ["-x", f"JAX_COORDINATOR_PORT={self.port}"]
        notes = (
            (
                "if a process is lost, all processes end; run the same command again, and the run "
                "continues from the newest checkpoint"
            ),
        )
        return Rendered({}, (*command, *job.train("--distributed")), waits=True, notes=notes)
