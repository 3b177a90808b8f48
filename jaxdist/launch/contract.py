"""The contract of engines: a job, and the files and commands by which an engine runs it.

An engine only renders files and commands; it starts nothing. Therefore a user can review the files
and commands before the launch, and tests need no cluster. The module `jaxdist.launch.submit` runs
the commands.
"""

from __future__ import annotations

import re
import shlex
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator

from jaxdist.config.schema import Config
from jaxdist.errors import ConfigError

FOLDER = "{folder}"


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
class Job:
    """A run of `jaxdist train` with one config, and with the same command in every process.

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
    """

    config: str
    overrides: tuple[str, ...]
    name: str
    module: str
    nodes: int = 1
    processes: int = 1
    folder: Path = Path()

    @property
    def count(self) -> int:
        """The number of processes on all nodes together."""
        return self.nodes * self.processes

    def train(self, *options: str, program: tuple[str, ...] = ("jaxdist",)) -> list[str]:
        """Return the command of a process, with `--resume`, so that a restarted job continues.

        Args:
          options: the options of the command besides `--resume`.
          program: the first words of the command, with which `jaxdist` starts.
        """
        return [*program, "train", self.config, *self.overrides, "--resume", *options]


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

    def at(self, folder: Path) -> Rendered:
        """Return the files and the command with a folder in place of the placeholder `{folder}`."""
        files = {name: text.replace(FOLDER, str(folder)) for name, text in self.files.items()}
        command = tuple(word.replace(FOLDER, str(folder)) for word in self.command)
        return replace(self, files=files, command=command)

    def text(self) -> str:
        """Return the files, the command and the notes as text for review."""
        parts = [f"# {name}\n{text.rstrip()}\n" for name, text in self.files.items()]
        parts.append(f"# run by\n{shlex.join(self.command)}\n")
        return "\n".join(parts + [f"# {note}" for note in self.notes])


@dataclass(frozen=True)
class Commands:
    """The engine's commands about a submitted job; a command that the engine lacks is empty."""

    status: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


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

    @abstractmethod
    def render(self, job: Job) -> Rendered:
        """Return the files and the command for a job."""

    def commands(self, identity: str, folder: Path) -> Commands:
        """Return the commands about a submitted job. By default there are no such commands.

        Args:
          identity: the name or number that the engine gave to the job.
          folder: the folder of the launch.
        """
        return Commands()


def one_node(job: Job, engine: str) -> None:
    """Check that a job has a single node.

    Args:
      engine: the name of the engine in the message.

    Raises:
      ConfigError: the job has several nodes.
    """
    if job.nodes > 1:
        raise ConfigError(
            f"--nodes {job.nodes}: the engine {engine} uses only one machine; use "
            "--processes-per-node, or --on slurm, mpi, ray, gke or tpu-vm"
        )


def seconds_of(text: str) -> int:
    """Return a time limit in seconds, from Slurm's form: minutes, H:M:S or D-H:M:S.

    >>> seconds_of("90"), seconds_of("1:30:00"), seconds_of("2-00")
    (5400, 5400, 172800)
    """
    days, dash, rest = text.partition("-") if "-" in text else ("0", "", text)
    parts = [int(part) for part in rest.split(":")]
    # Slurm reads "2" as 2 minutes, but "1-2" as 1 day and 2 hours.
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, parts[0], parts[1] if len(parts) > 1 else 0
    return int(days) * 86400 + hours * 3600 + minutes * 60 + seconds
