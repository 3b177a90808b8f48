"""Processes of the command line that are forked from a process that has imported everything.

The imports of training take two seconds of a core. Run as a program, this module is the process
that forks, like `jaxdist.cli.fork_server` for the processes of an agent. Tests use `Warm`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO
from unittest.mock import patch

from jaxdist.runtime.environment import plan_tunables
from jaxdist.runtime.forks import Forked, ForkServer, await_fork, hold_signals

HELPERS = Path(__file__).parent
MOST_BYTES = 1 << 24
"""The largest number of bytes that is read of a process's output."""


class Warm(ForkServer):
    """The process that forks processes of the command line; it starts with the first of them.

    Args:
      environ: the variables of the process; all forked processes must have the same values for
        variables that jax reads when it is imported.
      log: the file for the standard error of the process.
    """

    def __init__(self, environ: Mapping[str, str], log: Path) -> None:
        super().__init__("warm", log)
        paths = os.pathsep.join([str(HELPERS), str(HELPERS.parents[1])])
        tunables = plan_tunables({}, "glibc") or ""
        self._environ = {**environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
        self._environ["GLIBC_TUNABLES"] = tunables

    def start(self) -> None:
        """Start the process, which then imports everything."""
        with patch.dict(os.environ, self._environ, clear=True):
            super().start()

    def begin(
        self, args: Sequence[str], folder: Path, environ: Mapping[str, str], stdout: int | None
    ) -> Command:
        """Start `jaxdist args...` in a folder.

        Args:
          stdout: the descriptor for standard output, or None to keep the output in a file.
        """
        out, err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 (Command closes)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            pid = self.fork([theirs.fileno(), err.fileno()])
            order = {"args": list(args), "folder": str(folder), "environ": dict(environ)}
            line = json.dumps(order).encode()
            socket.send_fds(ours, [b"."], [out.fileno() if stdout is None else stdout])
            ours.sendall(line)
        return Command(self, pid, list(args), (out, err))


class Command(Forked):
    """A forked process of the command line, with its output."""

    def __init__(
        self, server: Warm, pid: int, args: list[str], files: tuple[IO[bytes], IO[bytes]]
    ) -> None:
        super().__init__(server, pid)
        self.args, self._files = args, files
        self._said: tuple[str, str] | None = None

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end of the process, and return its standard output and standard error."""
        self.wait(timeout)
        if self._said is None:
            out, err = map(_text, self._files)
            self._said = out, err
            for file in self._files:
                file.close()
        return self._said

    def printed(self) -> str:
        """Return the standard output of the process so far."""
        return self._said[0] if self._said else _text(self._files[0])


def _text(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), MOST_BYTES, 0).decode()


Process = subprocess.Popen[str] | Command


def main() -> None:
    """Import everything, fork on request, and run the command in each forked process."""
    hold_signals()
    from jaxdist.cli import main as command
    from jaxdist.cli import runs
    from jaxdist.runtime import environment

    runs.import_all()
    from lowering import share_contexts

    if not await_fork():
        return
    with socket.socket(fileno=os.dup(0)) as channel:
        _, (stdout,), _, _ = socket.recv_fds(channel, 1, 1)
        with channel.makefile("rb") as told:
            order = json.loads(told.read())
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for opened, standard in ((nowhere, 0), (stdout, 1)):
        os.dup2(opened, standard)
        os.close(opened)
    # Without these tunables the command would restart itself to set them.
    tunables = os.environ["GLIBC_TUNABLES"]
    os.environ.clear()
    os.environ.update(order["environ"], GLIBC_TUNABLES=tunables)
    # `jaxdist.wire` sets this variable when it is imported. The import was before the fork, and
    # gRPC reads the variable later.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.chdir(order["folder"])
    sys.argv = ["jaxdist", *order["args"]]

    def prepare(*, fake_devices: int | None = None) -> None:
        """Set the variables that XLA reads with its first program; jax has read all others."""
        os.environ.update(
            environment.plan_environment(
                dict(os.environ),
                fake_devices=fake_devices,
                idle_libtpu=environment.has_idle_libtpu(),
            )
        )

    environment.prepare = prepare
    share_contexts()
    command()


if __name__ == "__main__":
    main()
