"""The contract of engines: a job, and the files and commands by which an engine runs it.

An engine only renders. Nothing is started here, so everything can be reviewed before, and tested
without a cluster; `jaxdist.launch.submit` carries it out.
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
                f"{name!r} is no name of a variable: use letters, digits and '_', no digit first"
            )
    return given


Environment = Annotated[dict[str, str], AfterValidator(_variables)]
"""The environment variables of the processes, by name."""


@dataclass(frozen=True)
class Job:
    """The command `jaxdist train` for a config: the same command in every process.

    Attributes:
      config: the config file, relative to `folder`.
      overrides: settings that override those of the config.
      name: name for people, and for the engine's lists.
      module: module of the command `jaxdist`, for an engine whose nodes run it with their own
        interpreter. It is in a higher layer, so the command passes its name down.
      nodes: number of machines, or hosts of a slice of TPUs.
      processes: number of processes on each of them.
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
        """The number of all processes."""
        return self.nodes * self.processes

    def train(self, *options: str, program: tuple[str, ...] = ("jaxdist",)) -> list[str]:
        """Return the command of a process. A job that is restarted resumes."""
        return [*program, "train", self.config, *self.overrides, "--resume", *options]


@dataclass(frozen=True)
class Rendered:
    """The files and commands of a job on an engine.

    Attributes:
      files: text by name; written to a folder of the launch before anything is run.
      command: the command that submits, or runs, the job.
      waits: whether the command lasts as long as the job.
      notes: notes for a person, a line each.
    """

    files: Mapping[str, str]
    command: tuple[str, ...]
    waits: bool = False
    notes: tuple[str, ...] = ()

    def at(self, folder: Path) -> Rendered:
        """Replace the placeholder `{folder}` in texts and in the command by this folder."""
        files = {name: text.replace(FOLDER, str(folder)) for name, text in self.files.items()}
        command = tuple(word.replace(FOLDER, str(folder)) for word in self.command)
        return replace(self, files=files, command=command)

    def text(self) -> str:
        """Format everything for review."""
        parts = [f"# {name}\n{text.rstrip()}\n" for name, text in self.files.items()]
        parts.append(f"# run by\n{shlex.join(self.command)}\n")
        return "\n".join(parts + [f"# {note}" for note in self.notes])


@dataclass(frozen=True)
class Commands:
    """The engine's commands about a submitted job; () where it has none."""

    status: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


class Engine(Config):
    """A program that runs jobs on machines."""

    program: ClassVar[str]
    """The program that must be installed where the launch is done."""
    install: ClassVar[str]
    """Instructions to install it."""
    identity: ClassVar[str] = r"(\S+)"
    """Pattern of a job's name in the output of the submitting command."""

    def check(self, job: Job) -> None:
        """Refuse a job that the engine cannot run.

        Raises:
          ConfigError: such a job; the message says what to change.
        """

    @abstractmethod
    def render(self, job: Job) -> Rendered:
        """Render the files and the command."""

    def commands(self, identity: str, folder: Path) -> Commands:
        """Return the commands about a submitted job.

        Args:
          identity: the engine's name of the job.
          folder: the folder of the launch.
        """
        return Commands()


def one_node(job: Job, engine: str) -> None:
    """Refuse jobs with several nodes.

    Raises:
      ConfigError: there are several.
    """
    if job.nodes > 1:
        raise ConfigError(
            f"--nodes {job.nodes}: {engine} is one machine; use --processes-per-node, or --on "
            "slurm, mpi, ray, gke or tpu-vm"
        )


def seconds_of(text: str) -> int:
    """Return the seconds of a limit in Slurm's form: minutes, H:M:S or D-H:M:S.

    >>> seconds_of("90"), seconds_of("1:30:00"), seconds_of("2-00")
    (5400, 5400, 172800)
    """
    days, dash, rest = text.partition("-") if "-" in text else ("0", "", text)
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, parts[0], parts[1] if len(parts) > 1 else 0
    return int(days) * 86400 + hours * 3600 + minutes * 60 + seconds
