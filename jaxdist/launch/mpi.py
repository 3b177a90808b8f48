"""The engine of mpirun, from Open MPI 4 and 5."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import ClassVar, Literal

from jaxdist.config.schema import Count
from jaxdist.errors import ConfigError
from jaxdist.launch.contract import Engine, Job, Rendered


class Mpi(Engine):
    """The engine that starts processes with mpirun.

    The processes of a node have consecutive numbers, so that mesh neighbors are close.
    """

    program: ClassVar[str] = "mpirun"
    install: ClassVar[str] = "install Open MPI (openmpi-bin)"
    type: Literal["mpi"] = "mpi"
    """The name that selects this engine."""
    hosts: tuple[str, ...] = ()
    """The names of the nodes, with the node of process 0 first, and nodes for servers last; an
    empty list uses the nodes of the scheduler or, without a scheduler, this machine.
    """
    port: Count | None = None
    """The port of process 0; null derives the port from the number of mpirun's job."""
    export: tuple[str, ...] = ("XLA_FLAGS", "JAXDIST_CACHE", "PATH")
    """The environment variables of this shell that processes on other nodes also receive."""
    as_root: bool = False
    """Whether root may run mpirun, which is necessary in some containers."""

    def check(self, job: Job) -> None:
        nodes = job.nodes + job.server_nodes
        if self.hosts and len(self.hosts) != nodes:
            raise ConfigError(
                f"hosts: {len(self.hosts)} names for {_asked(job)}: give a name for each node"
            )
        if job.servers and not self.hosts and nodes > 2:
            raise ConfigError(
                f"{_asked(job)}: without the setting hosts, mpirun chooses the nodes, and servers "
                "could run on nodes that train: list all nodes in hosts, those that train first"
            )

    def on_one_machine(self, job: Job) -> bool:
        return not self.hosts

    def render(self, job: Job, folder: Path) -> Rendered:
        groups = job.groups("--distributed")
        alone = len(groups) == 1
        # With servers, nodes run different numbers of processes, so mpirun fills each node's slots.
        each = f"ppr:{job.processes}:node:OVERSUBSCRIBE" if alone else "slot:OVERSUBSCRIBE"
        options = ["--map-by", each, "--bind-to", "none"]
        if self.as_root:
            options.append("--allow-run-as-root")
        command, hosts = ["mpirun"], iter(self.hosts)
        for group in groups:
            command += ["-n", str(group.count), *options]
            if self.hosts:
                names = islice(hosts, group.nodes)
                command += ["--host", ",".join(f"{name}:{group.processes}" for name in names)]
            for name in self.export:
                command += ["-x", name]
            if group.role == "train":
                if self.port is not None:
                    command += ["-x", f"JAX_COORDINATOR_PORT={self.port}"]
                # The number of processes that train replaces mpirun's number, which includes the
                # servers.
                command += [] if alone else ["env", f"OMPI_COMM_WORLD_SIZE={group.count}"]
            command += [*group.command, ":"]
            options = []
        notes = (
            (
                "if a process is lost, all processes end; run the same command again, and the run "
                "continues from the newest checkpoint"
            ),
        )
        return Rendered({}, tuple(command[:-1]), waits=True, notes=notes)


def _asked(job: Job) -> str:
    """Return the options that give the numbers of machines of a job."""
    return f"--nodes {job.nodes}" + (f" --servers {job.server_nodes}" if job.servers else "")
