"""TPU VMs of Google's cloud, by gcloud: the same process on every host of a slice.

The processes are in sessions of their own, so that the run outlives the ssh connection that has
started it. Each host keeps the id and the log of its process beside the config.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from jaxdist.errors import ConfigError
from jaxdist.launch.contract import Commands, Engine, Environment, Job, Rendered

HOST_LAUNCHES = "runs/launches"
LOG_LINES = 50
# An id alone could be that of another process by now, after the host was started again.
_ALIVE = 'alive() { grep -qs jaxdist "/proc/$(cat "$at/pid" 2>/dev/null)/cmdline"; }'
_STATUS = """
if alive; then echo "$(hostname): process $(cat "$at/pid") is training"
else echo "$(hostname): no process; the last line of its log: $(tail -n 1 "$at/train.log")"; fi
""".strip()
_LOGS = f'echo "== $(hostname)"; tail -n {LOG_LINES} "$at/train.log"'
_STOP = 'if alive; then kill -TERM "$(cat "$at/pid")"; else echo "$(hostname): no process"; fi'


class TpuVm(Engine):
    """A slice that is there already; `gcloud compute tpus tpu-vm create` makes one."""

    program: ClassVar[str] = "gcloud"
    install: ClassVar[str] = "install the Google Cloud CLI (cloud.google.com/sdk)"
    identity: ClassVar[str] = r"^launched (\S+)"
    type: Literal["tpu-vm"] = "tpu-vm"
    """Selects this engine."""
    slice: str
    """The name of the TPU VM."""
    zone: str
    """The zone that it is in, as us-east5-a."""
    project: str | None = None
    """The project that it belongs to; null is gcloud's own."""
    folder: str
    """The folder on every host where the config lies."""
    setup: str = ""
    """Shell commands before the process starts, as `source venv/bin/activate`."""
    environment: Environment = Field(default_factory=dict)
    """Variables of the processes: `environment.LIBTPU_INIT_ARGS=...`."""

    def check(self, job: Job) -> None:
        if job.nodes > 1 or job.processes > 1:
            raise ConfigError(
                "tpu-vm starts one process on every host of the slice: leave --nodes and "
                "--processes-per-node away"
            )

    def render(self, job: Job) -> Rendered:
        words = [f"{name}={text}" for name, text in self.environment.items()]
        command = shlex.join(["env", *words, *job.train("--distributed")])
        # The process writes its own id: setsid may start another one.
        begun = shlex.quote(f'echo $$ >"$0/pid"; exec {command}')
        lines = [
            'if alive; then echo "$(hostname) has this run already: launch stop" >&2; exit 1; fi',
            *(["set -e", self.setup, "set +e"] if self.setup else []),
            f'nohup setsid sh -c {begun} "$at" >>"$at/train.log" 2>&1 </dev/null &',
            f"echo launched {shlex.quote(job.name)}",
        ]
        notes = ("the run goes on when the connection ends; launch status, logs and stop find it",)
        return Rendered({}, self._ssh(job.name, "\n".join(lines)), notes=notes)

    def commands(self, identity: str, folder: Path) -> Commands:
        return Commands(
            self._ssh(identity, _STATUS),
            self._ssh(identity, _LOGS),
            self._ssh(identity, _STOP),
        )

    def _ssh(self, name: str, script: str) -> tuple[str, ...]:
        """The command that runs a script on all hosts, in the folder, with `$at` and `alive`."""
        at = shlex.quote(f"{HOST_LAUNCHES}/{name}")
        begin = f'cd {shlex.quote(self.folder)} && at={at} && mkdir -p "$at" || exit\n{_ALIVE}\n'
        project = () if self.project is None else (f"--project={self.project}",)
        where = (f"--zone={self.zone}", *project, "--worker=all")
        ssh = ("gcloud", "compute", "tpus", "tpu-vm", "ssh", self.slice, *where)
        return (*ssh, f"--command={begin}{script}")
