"""The child processes of a run with parameter servers: servers, aggregators and workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

from jaxdist.runtime import children
from jaxdist.runtime.children import Event
from jaxdist.runtime.environment import python_module
from jaxdist.types import JsonObject

Role = Literal["server", "aggregator", "worker"]


class RunProcess(children.Child):
    """A server, an aggregator or a worker.

    Args:
      number: the number of the server, the rack, or the client.
      setup: its first message.
      module: the Python module that it runs, with its role as the argument.
    """

    def __init__(
        self,
        role: Role,
        number: int,
        setup: JsonObject,
        *,
        module: str,
        environ: Mapping[str, str],
        log: Path,
        events: SimpleQueue[Event],
    ) -> None:
        self.role, self.number = role, number
        command = python_module(module, role)
        super().__init__(f"{role} {number}", command, environ=environ, log=log, events=events)
        self.say(setup)


@dataclass
class WorkerTeam:
    """The workers of a run.

    Attributes:
      workers: client number to process.
      slots: client number to the number of its part of each batch.
      deaths: slot to its deaths in a row, without a finished clock in between.
      done: slots that have taken all their clocks.
    """

    workers: dict[int, RunProcess] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    deaths: Counter[int] = field(default_factory=Counter)
    done: set[int] = field(default_factory=set)
