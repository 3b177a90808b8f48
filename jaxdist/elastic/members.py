"""The processes of a generation: forked from one that has imported all.

What one of them is to do is one JSON line on its standard input.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from signal import Signals

from jaxdist.heartbeat.run_folder import held
from jaxdist.runtime.forks import ForkServer
from jaxdist.types import Json

LAST_LINES = 15


class Member:
    """One process.

    Args:
      log: where its standard error goes.
      args: of `jaxdist.cli.runs.train_process`.
      environ: variables besides the server's own.

    Attributes:
      index: among the processes of its generation.
    """

    def __init__(
        self,
        server: ForkServer,
        log: Path,
        index: int,
        args: Mapping[str, Json],
        environ: Mapping[str, str],
    ) -> None:
        self.log, self.index, self._server = log, index, server
        self._code: int | None = None
        reader, writer = os.pipe()
        self._orders = os.fdopen(writer, "wb")  # while it is open this agent is there
        try:
            with log.open("ab") as errors, held(log.parent) as descriptor:
                self.pid = server.fork([reader, errors.fileno(), descriptor])
        finally:
            os.close(reader)
        with suppress(BrokenPipeError):  # its end is seen soon enough
            self._orders.write(json.dumps({"args": {**args}, "environ": {**environ}}).encode())
            self._orders.write(b"\n")
            self._orders.flush()

    def poll(self) -> int | None:
        """Its exit code; None while it lives."""
        if self._code is None:
            self._code = self._server.ended(self.pid)
        return self._code

    def signal(self, number: int) -> None:
        """Send it a signal."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it and all that it has started; returns when it is gone."""
        for end in (os.killpg, os.kill):  # in its first moment it leads no group
            with suppress(ProcessLookupError, PermissionError):
                end(self.pid, Signals.SIGKILL)
        if self._code is None:
            self._code = self._server.ended(self.pid, wait=True)
        with suppress(BrokenPipeError):
            self._orders.close()

    def last_words(self, count: int = LAST_LINES) -> str:
        """The end of its standard error: so many lines."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return "\n".join(lines[-count:])


def how_ended(code: int) -> str:
    """An exit code for a person.

    >>> how_ended(-9), how_ended(3)
    ('signal SIGKILL', 'exit code 3')
    """
    return f"signal {Signals(-code).name}" if code < 0 else f"exit code {code}"
