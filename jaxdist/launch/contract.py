"""The contract of engines: what is run, and the files and commands that an engine runs it by.

An engine only renders. Nothing is started here, so that all of it can be read before, and tested
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
"""Variables of the processes, by name."""


@dataclass(frozen=True)
class Job:
    """`jaxdist train` of one config: the same command in every process.

    Attributes:
      config: the file, as the processes find it from `folder`.
      overrides: settings that replace its own.
      name: for people, and for the engine's lists.
      module: of the command `jaxdist`, for an engine whose nodes run it by an interpreter of their
        own. It stands above this room in the layers, so that the command passes its name down.
      nodes: how many machines, or hosts of one slice of TPUs.
      processes: on each of them.
      folder: where it runs; all nodes see it.
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
        """All processes."""
        return self.nodes * self.processes

    def train(self, *options: str, program: tuple[str, ...] = ("jaxdist",)) -> list[str]:
        """The command of a process. A job that begins again goes on where it was."""
        return [*program, "train", self.config, *self.overrides, "--resume", *options]


@dataclass(frozen=True)
class Rendered:
    """What an engine runs.

    Attributes:
      files: name to text; written to a folder of the launch before anything is run.
      command: submits, or runs, the job.
      waits: the command lasts as long as the job does.
      notes: what a person should know, a line each.
    """

    files: Mapping[str, str]
    command: tuple[str, ...]
    waits: bool = False
    notes: tuple[str, ...] = ()

    def at(self, folder: Path) -> Rendered:
        """With its files in this folder: `{folder}` stands for it, in texts and in the command."""
        files = {name: text.replace(FOLDER, str(folder)) for name, text in self.files.items()}
        command = tuple(word.replace(FOLDER, str(folder)) for word in self.command)
        return replace(self, files=files, command=command)

    def text(self) -> str:
        """All of it, to be reviewed."""
        parts = [f"# {name}\n{text.rstrip()}\n" for name, text in self.files.items()]
        parts.append(f"# run by\n{shlex.join(self.command)}\n")
        return "\n".join(parts + [f"# {note}" for note in self.notes])


@dataclass(frozen=True)
class Commands:
    """What is asked of an engine about a job that it has; () where it cannot tell."""

    status: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


class Engine(Config):
    """Something that runs jobs on machines."""

    program: ClassVar[str]
    """What must be installed where the launch is done."""
    install: ClassVar[str]
    """How to come by it."""
    identity: ClassVar[str] = r"(\S+)"
    """Of a job, in what the submitting command prints."""

    def check(self, job: Job) -> None:
        """Refuse a job that the engine cannot run.

        Raises:
          ConfigError: with what to change.
        """

    @abstractmethod
    def render(self, job: Job) -> Rendered:
        """The files and the command."""

    def commands(self, identity: str, folder: Path) -> Commands:
        """About a job that was submitted.

        Args:
          identity: what the engine calls it.
          folder: of the launch.
        """
        return Commands()


def one_node(job: Job, engine: str) -> None:
    """Refuse several nodes.

    Raises:
      ConfigError: there are several.
    """
    if job.nodes > 1:
        raise ConfigError(
            f"--nodes {job.nodes}: {engine} is one machine; use --processes-per-node, or --on "
            "slurm, mpi, ray, gke or tpu-vm"
        )


def seconds_of(text: str) -> int:
    """Of a limit as Slurm writes it: minutes, H:M:S or D-H:M:S.

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
