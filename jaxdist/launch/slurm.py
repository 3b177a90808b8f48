"""The engine of Slurm; its batch script requeues a job that stops before the end of the run.

When Slurm preempts a job, it sends SIGTERM to the job's steps, but not to the job's script. If the
steps then exit without an error, Slurm considers the job completed. The script therefore checks
whether the job was preempted, and requeues the job. Before the time limit, Slurm sends SIGUSR1 to
the script (`--signal=B:USR1`), and the script sends SIGTERM to the step. A canceled job is not
requeued.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from jaxdist.config.schema import Config, Count
from jaxdist.errors import ConfigError
from jaxdist.launch.contract import (
    Engine,
    Environment,
    HostGroup,
    Job,
    Rendered,
    seconds_of,
)

SCRIPT = "job.sbatch"
_NODES = '"SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST_HET_GROUP_0"'
_BEGIN = """\
echo "$(date --iso-8601=seconds) begins, queued again ${SLURM_RESTART_COUNT:-0} times"
"""
_END = """\
step=$!
# Not by a signal to srun, which would kill the processes.
trap 'again="the time limit is near"; scancel --signal=TERM "$SLURM_JOB_ID.0"' USR1
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done  # a signal ends a wait too
if scontrol show job --oneliner "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; then
  again="another job needs the nodes"
fi
if [ -n "$again" ]; then
  echo "$(date --iso-8601=seconds) to be queued again: $again"
  scontrol requeue "$SLURM_JOB_ID" && sleep 600  # until it is ended for that
fi
exit "$code"
"""


class SlurmServers(Config):
    """The settings in which the nodes for servers differ from the nodes that train."""

    partition: str | None = None
    """The partition of these nodes; null uses the partition of the nodes that train."""
    constraint: str | None = None
    """The features that these nodes must have; null requires none."""
    cpus_per_process: Count | None = None
    """The number of cores of each server; null uses the cluster's default."""
    memory: Count | str | None = None
    """The memory of each node, in Slurm's form; null uses the cluster's default."""
    options: tuple[str, ...] = ()
    """The options of sbatch for these nodes for which there is no setting."""


class Slurm(Engine):
    """The engine of Slurm: sbatch submits a script that starts the processes with srun."""

    program: ClassVar[str] = "sbatch"
    install: ClassVar[str] = "install Slurm's client (slurm-client), on a login node"
    identity: ClassVar[str] = r"^(\d+)"
    type: Literal["slurm"] = "slurm"
    """The name that selects this engine."""
    partition: str | None = None
    """The partition, or several partitions separated by commas; null uses the cluster's default."""
    time: Count | Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$")] = "1-00:00:00"
    """The time limit in Slurm's form: minutes, H:M:S, D-H:M:S."""
    notice_seconds: Count = 300
    """The time before the limit, in seconds, at which all processes save and stop, and the job is
    requeued.
    """
    account: str | None = None
    """The account to which the job is charged; null uses the user's default."""
    qos: str | None = None
    """The quality of service of the job; null uses the default."""
    constraint: str | None = None
    """The features that nodes must have; null requires none."""
    gpus_per_node: Count | None = None
    """The number of GPUs to request on each node, which are divided evenly among the processes of
    the node."""
    cpus_per_process: Count | None = None
    """The number of cores of each process; null uses the cluster's default."""
    memory: Count | str | None = None
    """The memory of each node, in Slurm's form: 64G, or a number of megabytes."""
    options: tuple[str, ...] = ()
    """The options of sbatch for which there is no setting, such as `--exclusive`."""
    srun: tuple[str, ...] = ()
    """The options of the srun that starts the processes, such as
    `--container-image=/images/train.sqsh`.
    """
    setup: str = ""
    """The shell commands that run before srun, such as `module load cuda; source
    venv/bin/activate`; a command that fails ends the job."""
    environment: Environment = Field(default_factory=dict)
    """The environment variables of the processes, such as `environment.NCCL_DEBUG=INFO`."""

    servers: SlurmServers = SlurmServers()
    """The nodes of `--servers`, which are the second component of a heterogeneous job."""

    def check(self, job: Job) -> None:
        if seconds_of(str(self.time)) <= self.notice_seconds:
            raise ConfigError(
                f"time {self.time} is not longer than notice_seconds {self.notice_seconds}, so no "
                "time is left to train: use a longer time, or fewer notice_seconds"
            )
        if self.gpus_per_node and self.gpus_per_node % job.processes:
            raise ConfigError(
                f"gpus_per_node {self.gpus_per_node} cannot be divided evenly among "
                f"--processes-per-node {job.processes}: change one of the two numbers"
            )

    def render(self, job: Job, folder: Path) -> Rendered:
        groups = job.groups("--distributed")
        steps = [shlex.join([*self.srun, *group.command]) for group in groups]
        name = f"--job-name={re.sub('[^A-Za-z0-9_.-]', '-', job.name)}"
        lines = [
            name,
            # Processes that are neighbors on the mesh get the same node, or nodes that are near.
            "--distribution=block:block",
            f"--signal=B:USR1@{self.notice_seconds}",
            "--open-mode=append",  # A requeued job must not overwrite its earlier log.
            f"--chdir={job.folder}",
            f"--output={folder}/slurm-%j.log",
            *self._lines(groups[0], self),
        ]
        if len(groups) > 1:
            # The variables of srun count the processes and nodes of both components.
            own = f"env -u SLURM_HET_SIZE SLURM_STEP_NUM_TASKS={job.count} {_NODES}"
            trains = f"{shlex.join(self.srun)} {own} {shlex.join(groups[0].command)}".lstrip()
            steps = [f"--het-group=0 {trains}", f"--het-group=1 {steps[1]}"]
            lines += ["hetjob", name, *self._lines(groups[1], self.servers)]
        exports = [f"export {name}={shlex.quote(text)}" for name, text in self.environment.items()]
        # Only the setup runs under `set -e`, since the script has to requeue the job even if srun
        # fails.
        setup = ["set -e", self.setup, "set +e"] if self.setup else []
        before = "".join(f"{line}\n" for line in [*setup, *exports])
        begin = f"{_BEGIN}{before}again=\nsrun --kill-on-bad-exit=1 {' : '.join(steps)} &\n"
        text = "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), begin + _END])
        return Rendered({SCRIPT: text}, ("sbatch", "--parsable", str(folder / SCRIPT)))

    def _lines(self, group: HostGroup, own: Slurm | SlurmServers) -> list[str]:
        """Return the options of sbatch for a group of processes.

        Args:
          own: the settings of this group's nodes, which differ between groups.
        """
        given = {
            "partition": own.partition or self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": own.constraint,
            # With GPUs per task, Slurm would confine each task to its GPUs, and the processes of a
            # node could not copy between GPUs directly. Therefore the processes divide the GPUs
            # themselves.
            "gpus-per-node": self.gpus_per_node if group.role == "train" else None,
            "cpus-per-task": own.cpus_per_process,
            "mem": own.memory,
        }
        return [
            f"--nodes={group.nodes}",
            f"--ntasks-per-node={group.processes}",
            f"--time={self.time}",
            "--requeue",
            *(f"--{name}={value}" for name, value in given.items() if value is not None),
            *own.options,
        ]

    def commands(self, identity: str, folder: Path) -> Mapping[str, Sequence[str]]:
        return {
            "status": ("scontrol", "show", "job", "--oneliner", identity),
            "logs": ("tail", "-n", "50", str(folder / f"slurm-{identity}.log")),
            "stop": ("scancel", identity),
        }
