"""TPU VMs of Google's cloud, by gcloud: the same command on every host of a slice."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import ClassVar, Literal

from jaxdist.errors import ConfigError
from jaxdist.launch.contract import Commands, Engine, Job, Rendered


class TpuVm(Engine):
    """A slice that is there already; `gcloud compute tpus tpu-vm create` makes one."""

    program: ClassVar[str] = "gcloud"
    install: ClassVar[str] = "install the Google Cloud CLI (cloud.google.com/sdk)"
    type: Literal["tpu-vm"] = "tpu-vm"
    """Selects this engine."""
    slice: str
    """The name of the TPU VM."""
    zone: str
    """Where it is, as us-east5-a."""
    project: str | None = None
    """Whose it is; null is gcloud's own."""
    folder: str
    """On every host: where jaxdist is installed and the config lies."""

    def check(self, job: Job) -> None:
        if job.nodes > 1 or job.processes > 1:
            raise ConfigError(
                "tpu-vm starts one process on every host of the slice: leave --nodes and "
                "--processes-per-node away"
            )

    def render(self, job: Job) -> Rendered:
        run = f"cd {shlex.quote(self.folder)} && {shlex.join(job.train('--distributed'))}"
        return Rendered({}, (*self._ssh, f"--command={run}"), waits=True)

    @property
    def _ssh(self) -> tuple[str, ...]:
        project = () if self.project is None else (f"--project={self.project}",)
        where = (f"--zone={self.zone}", *project, "--worker=all")
        return ("gcloud", "compute", "tpus", "tpu-vm", "ssh", self.slice, *where)

    def commands(self, identity: str, folder: Path) -> Commands:
        return Commands(
            status=(*self._ssh, "--command=pgrep -af 'jaxdist train'"),
            stop=(*self._ssh, "--command=pkill -TERM -f 'jaxdist train'"),
        )
