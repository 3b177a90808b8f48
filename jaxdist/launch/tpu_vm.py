"""The engine of Google's TPU VMs, which starts a process on every host of a slice by gcloud.

Each process is in a new session, so that the run outlives the ssh connection that started it. Each
host has a folder below the folder of the config, with the id and the log of its process.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from jaxdist.errors import ConfigError
from jaxdist.launch.contract import Engine, Environment, Job, Rendered, no_servers

HOST_LAUNCHES = "runs/launches"
LOG_LINES = 50
# The id alone does not identify the process: after a restart of the host, another process may have
# the same id.
_ALIVE = 'alive() { grep -qs jaxdist "/proc/$(cat "$at/pid" 2>/dev/null)/cmdline"; }'
_STATUS = """
if alive; then echo "$(hostname): process $(cat "$at/pid") is training"
else echo "$(hostname): no process; the last line of its log: $(tail -n 1 "$at/train.log")"; fi
""".strip()
_LOGS = f'echo "== $(hostname)"; tail -n {LOG_LINES} "$at/train.log"'
_STOP = 'if alive; then kill -TERM "$(cat "$at/pid")"; else echo "$(hostname): no process"; fi'


class TpuVm(Engine):
    """The engine of an existing TPU slice, which `gcloud compute tpus tpu-vm create` has made."""

    program: ClassVar[str] = "gcloud"
    install: ClassVar[str] = "install the Google Cloud CLI (cloud.google.com/sdk)"
    identity: ClassVar[str] = r"^launched (\S+)"
    type: Literal["tpu-vm"] = "tpu-vm"
    """The name that selects this engine."""
    slice: str
    """The name of the TPU VM."""
    zone: str
    """The zone of the TPU VM, such as us-east5-a."""
    project: str | None = None
    """The project of the TPU VM; null uses the project that is set in gcloud."""
    folder: str
    """The folder on every host that contains the config."""
    setup: str = ""
    """The shell commands that run before the process, such as `source venv/bin/activate`."""
    environment: Environment = Field(default_factory=dict)
    """The environment variables of the processes, such as `environment.LIBTPU_INIT_ARGS=...`."""

    def check(self, job: Job) -> None:
        if job.nodes > 1 or job.processes > 1:
            raise ConfigError(
                "tpu-vm starts one process on every host of the slice: leave out --nodes and "
                "--processes-per-node"
            )
        no_servers(
            job,
            "tpu-vm",
            "leave out --servers; while the run trains, start `jaxdist servers RUN --here` on "
            "other VMs that share the run directory",
        )

    def render(self, job: Job, folder: Path) -> Rendered:
        words = [f"{name}={text}" for name, text in self.environment.items()]
        command = shlex.join(["env", *words, *job.groups("--distributed")[0].command])
        # The process writes its id itself, because setsid may fork, and the shell's `$!` may then
        # be the id of another process.
        begun = shlex.quote(f'echo $$ >"$0/pid"; exec {command}')
        lines = [
            'if alive; then echo "$(hostname) has this run already: launch stop" >&2; exit 1; fi',
            *(["set -e", self.setup, "set +e"] if self.setup else []),
            f'nohup setsid sh -c {begun} "$at" >>"$at/train.log" 2>&1 </dev/null &',
            f"echo launched {shlex.quote(job.name)}",
        ]
        notes = (
            ("the run continues when the connection ends; launch status, logs and stop find it"),
        )
        return Rendered({}, self._ssh(job.name, "\n".join(lines)), notes=notes)

    def commands(self, identity: str, folder: Path) -> Mapping[str, Sequence[str]]:
        scripts = {"status": _STATUS, "logs": _LOGS, "stop": _STOP}
        return {name: self._ssh(identity, script) for name, script in scripts.items()}

    def _ssh(self, name: str, script: str) -> tuple[str, ...]:
        """Return the command that runs a script on all hosts; the script may call `alive`."""
        at = shlex.quote(f"{HOST_LAUNCHES}/{name}")
        begin = f'cd {shlex.quote(self.folder)} && at={at} && mkdir -p "$at" || exit\n{_ALIVE}\n'
        project = () if self.project is None else (f"--project={self.project}",)
        where = (f"--zone={self.zone}", *project, "--worker=all")
        ssh = ("gcloud", "compute", "tpus", "tpu-vm", "ssh", self.slice, *where)
        return (*ssh, f"--command={begin}{script}")
