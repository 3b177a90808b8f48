"""The contract of engines: a job, and the files and commands by which an engine runs it.

An engine only renders files and commands; it starts nothing. Therefore a user can review the files
and commands before the launch, and tests need no cluster. The module `jaxdist.launch.submit` runs
the commands.
"""

from __future__ import annotations

import re
import shlex
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from jaxdist.config.schema import Config
from jaxdist.errors import ConfigError

WAIT_SECONDS = 600
"""The seconds for which a server of a job waits until the run has begun."""


def _variables(given: dict[str, str]) -> dict[str, str]:
    for name in given:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(
                f"{name!r} is not a valid name of an environment variable: use letters, digits and "
                "'_', and do not begin with a digit"
            )
    return given


Environment = Annotated[dict[str, str], AfterValidator(_variables)]
"""The environment variables of a process, as a mapping from valid names to values."""


@dataclass(frozen=True)
class HostGroup:
    """The processes of a job that run one command, on machines of one kind.

    Attributes:
      role: "train" for the processes that train, or "serve" for servers. Only the processes that
        train have process numbers.
      nodes: the number of machines.
      processes: the number of processes on each machine.
      command: the words of the command.
    """

    role: Literal["train", "serve"]
    nodes: int
    processes: int
    command: tuple[str, ...]

    @property
    def count(self) -> int:
        """The number of processes on all nodes together."""
        return self.nodes * self.processes


@dataclass(frozen=True)
class Job:
    """A run of `jaxdist train` with one config, and with the same command in every process.

    A job may also have machines for servers, on which each process runs one server of the run.

    Attributes:
      config: the config file, relative to `folder`.
      overrides: the settings that override the config, as texts `section.key=value`.
      name: the name of the job in messages and in the engine's lists.
      module: the name of the module of the command `jaxdist`, for an engine whose nodes run the
        module with the interpreter of the node. This package may not import the module, so the
        command passes the name.
      nodes: the number of machines or, for TPUs, the number of hosts of a slice.
      processes: the number of processes on each machine.
      folder: the working directory, which all nodes share.
      servers: the number of servers, or 0 if process 0 starts the servers.
      server_nodes: the number of machines for servers, which divides `servers`.
      run: the run directory, in which a server finds the run.
      apart: whether the processes that train communicate only through servers, as workers of
        `strategy.type: parameter_server` do. An engine can then restart each of them alone.
    """

    config: str
    overrides: tuple[str, ...]
    name: str
    module: str
    nodes: int = 1
    processes: int = 1
    folder: Path = Path()
    servers: int = 0
    server_nodes: int = 0
    run: str = ""
    apart: bool = False

    @property
    def count(self) -> int:
        """The number of processes that train, on all nodes together."""
        return self.nodes * self.processes

    def groups(
        self, *options: str, program: tuple[str, ...] = ("jaxdist",)
    ) -> tuple[HostGroup, ...]:
        """Return the processes that train and, if the job has machines for servers, the servers.

        A server ends with exit code 0 when the run ends, so the processes that train decide how the
        job ends.

        Args:
          options, program: the arguments of `train`. The options are only for processes that train.
        """
        # With --resume, a restarted job continues.
        command = (*program, "train", self.config, *self.overrides, "--resume", *options)
        train = HostGroup("train", self.nodes, self.processes, command)
        if not self.servers:
            return (train,)
        wait = "--here", "--wait", str(WAIT_SECONDS)
        serve = (*program, "servers", self.run, *wait)
        return train, HostGroup(
            "serve", self.server_nodes, self.servers // self.server_nodes, serve
        )


@dataclass(frozen=True)
class Rendered:
    """The files and commands of a job on an engine.

    Attributes:
      files: the text of each file by name; the files are written to the folder of the launch before
        the command runs.
      command: the command that submits the job, or runs it.
      waits: whether the command lasts as long as the job.
      notes: the lines for the user.
    """

    files: Mapping[str, str]
    command: tuple[str, ...]
    waits: bool = False
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the files, the command and the notes as text for review."""
        parts = [f"# {name}\n{text.rstrip()}\n" for name, text in self.files.items()]
        parts.append(f"# run by\n{shlex.join(self.command)}\n")
        return "\n".join(parts + [f"# {note}" for note in self.notes])


class Engine(Config):
    """An engine, which is a program that runs jobs on machines; its fields are its settings."""

    program: ClassVar[str]
    """The name of the program, which must be installed on the machine of the launch."""
    install: ClassVar[str]
    """The instructions to install the program."""
    identity: ClassVar[str] = r"(\S+)"
    """The pattern of a job's name or number in the output of the command that submits the job."""

    def check(self, job: Job) -> None:
        """Check that the engine can run a job.

        Raises:
          ConfigError: the engine cannot run the job; the message gives the setting to change.
        """

    def on_one_machine(self, job: Job) -> bool:
        """Return whether all processes of a job run on this machine."""
        return False

    @abstractmethod
    def render(self, job: Job, folder: Path) -> Rendered:
        """Return the files that a job needs, and the command that starts the job.

        Args:
          folder: the folder of the launch, into which the files are written.
        """

    def commands(self, identity: str, folder: Path) -> Mapping[str, Sequence[str]]:
        """Return the commands `status`, `logs` and `stop` for a submitted job, by name.

        By default there are no such commands.

        Args:
          identity: the name or number that the engine gave to the job.
          folder: the folder of the launch.
        """
        return {}


def no_servers(job: Job, engine: str, instead: str) -> None:
    """Check that a job has no machines for servers.

    Args:
      engine: the name of the engine in the message.
      instead: the advice to the user.

    Raises:
      ConfigError: the job has machines for servers.
    """
    if job.servers:
        raise ConfigError(
            f"--servers {job.server_nodes}: the engine {engine} has no machines for servers: "
            f"{instead}"
        )


def seconds_of(text: str) -> int:
    """Return a time limit in seconds, from Slurm's form: minutes, H:M:S or D-H:M:S.

    >>> seconds_of("90"), seconds_of("1:30:00"), seconds_of("2-00")
    (5400, 5400, 172800)
    """
    days, _, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    # Slurm reads "2" as 2 minutes, but "1-2" as 1 day and 2 hours.
    parts = parts if days or len(parts) == 3 else [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
