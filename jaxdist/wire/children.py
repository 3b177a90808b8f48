"""The child processes of a run with parameter servers: servers, aggregators and workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

from jaxdist.runtime.children import Child, Event, PipedProcess
from jaxdist.types import JsonObject

Role = Literal["server", "aggregator", "table", "worker"]


class RunProcess(Child):
    """A child process of a run: a server, an aggregator, a table server or a worker.

    Args:
      number: the number of the server, the rack, or the client.
      setup: the first message to the process, to which its role is added.
      begin: the function that starts the process (see `jaxdist.runtime.children.Child`).
    """

    def __init__(
        self,
        role: Role,
        number: int,
        setup: JsonObject,
        *,
        begin: Callable[[int, int], PipedProcess],
        log: Path,
        events: SimpleQueue[Event],
    ) -> None:
        self.role, self.number = role, number
        super().__init__(f"{role} {number}", begin, log=log, events=events)
        self.say({"role": role, **setup})


@dataclass
class WorkerTeam:
    """The workers of a run.

    Attributes:
      workers: the process of each client.
      slots: the number of each client's part of a batch.
      deaths: the number of successive deaths of a slot's workers, without a finished clock between
        two deaths.
      done: the slots whose workers have finished all their clocks.
    """

    workers: dict[int, RunProcess] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    deaths: Counter[int] = field(default_factory=Counter)
    done: set[int] = field(default_factory=set)
