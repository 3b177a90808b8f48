"""The processes of a generation, forked from a process that has already imported all modules.

Each process receives its task as one JSON line on its standard input.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from signal import Signals

from jaxdist.heartbeat.run_folder import held
from jaxdist.runtime.children import LAST_LINES, last_lines, send
from jaxdist.runtime.forks import Forked, ForkServer
from jaxdist.types import Json


class Member(Forked):
    """A running process of a generation, as its agent sees it.

    Args:
      log: the file of the process's standard error.
      args: the arguments of `jaxdist.cli.runs.train_process`.
      environ: variables in addition to the variables of the fork server.

    Attributes:
      index: the number of the process within its generation.
    """

    def __init__(
        self,
        server: ForkServer,
        log: Path,
        index: int,
        args: Mapping[str, Json],
        environ: Mapping[str, str],
    ) -> None:
        self.log, self.index = log, index
        reader, writer = os.pipe()
        # The pipe stays open while this agent lives. The end of the pipe tells the process to stop.
        self._orders = os.fdopen(writer, "wb")
        try:
            with log.open("ab") as errors, held(log.parent) as descriptor:
                pid = server.fork([reader, errors.fileno(), descriptor])
        finally:
            # The child has its own copy of `reader`. If this process kept its copy open, a write to
            # a dead child would never fail.
            os.close(reader)
        super().__init__(server, pid)
        send(self._orders, {"args": {**args}, "environ": {**environ}})

    def kill(self) -> None:
        """Kill the process and all processes that it started; return when the process is gone."""
        # The process leads a group only after its `setsid`. Before that, only the process itself
        # can be killed.
        for end in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                end(self.pid, Signals.SIGKILL)
        self.wait()
        # `close` writes buffered input to the process, which fails if the process is dead.
        with suppress(BrokenPipeError):
            self._orders.close()

    def last_words(self, count: int = LAST_LINES) -> str:
        """Return the last `count` lines of the process's standard error."""
        return last_lines(self.log, count)
