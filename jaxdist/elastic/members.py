"""The processes of a generation: started early, so that they have imported all when they are told.

A member waits on its standard input for one JSON line, and then is a process of the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from signal import Signals

from jaxdist.elastic.place import held
from jaxdist.types import Json

STANDBY = "jaxdist.cli.standby"
LAST_LINES = 15


class Member:
    """One process.

    Args:
      log: where its standard error goes.

    Attributes:
      index: among the processes of its generation; None while it waits.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self.index: int | None = None
        with log.open("ab") as errors, held(log.parent) as descriptor:
            # A session of its own: the terminal's signals are the agent's to pass on.
            self.process = subprocess.Popen(
                [sys.executable, "-m", STANDBY],
                stdin=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                pass_fds=[descriptor],
            )

    def begin(self, index: int, args: Mapping[str, Json], environ: Mapping[str, str]) -> None:
        """Let it be a process of the run.

        Args:
          args: of `jaxdist.cli.runs.train_process`.
          environ: variables besides this process's own.
        """
        self.index = index
        stdin = self.process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):  # its end is seen soon enough
            stdin.write(json.dumps({"args": {**args}, "environ": {**environ}}).encode() + b"\n")
            stdin.flush()

    def poll(self) -> int | None:
        """Its exit code; None while it lives."""
        return self.process.poll()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        """End it and all that it has started; returns when it is gone."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, Signals.SIGKILL)
        self.process.wait()
        stdin = self.process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):
            stdin.close()

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
