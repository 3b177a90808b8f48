"""Processes that are forked from one that has imported all already.

To import what training needs takes seconds of a core for each process; a fork takes milliseconds
and shares the memory. The server has no threads of its own and has started no backend: what it
forks is as if it had imported all by itself. It answers on the socket that is its standard input.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from jaxdist.errors import RunError
from jaxdist.runtime.environment import python_module
from jaxdist.types import Json

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""What a scheduler sends to all processes of a job: the agent's to answer, and the forked ones'."""
MOST_FILES = 8


class ForkServer:
    """The server, as who asks it sees it; `start` it before it is needed, and `close` it.

    Args:
      module: calls `hold_signals`, imports, and then `await_fork`.
      log: where the server's own standard error goes.
    """

    def __init__(self, module: str, log: Path) -> None:
        self._module, self._log = module, log
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._rest, self._forked = b"", list[int]()
        self._codes: dict[int, int] = {}

    def start(self) -> None:
        """Let it import, while the caller goes on."""
        self.close()
        self._channel, theirs = socket.socketpair()
        with theirs, self._log.open("ab") as errors:
            # A session of its own: the terminal's signals are the caller's to pass on.
            self._process = subprocess.Popen(
                python_module(self._module),
                stdin=theirs.fileno(),
                stderr=errors,
                start_new_session=True,
            )

    def fork(self, files: Sequence[int]) -> int:
        """A process; returns when it is there.

        Args:
          files: descriptors of its standard input, its standard error, and what it is to hold.

        Returns:
          its id; it leads a session.

        Raises:
          RunError: the server did not come up.
        """
        for _ in range(2):  # one that has ended since it was last asked is started anew
            if self._channel is None:
                self.start()
            assert self._channel is not None
            with suppress(OSError):  # its end is heard
                socket.send_fds(self._channel, [b"."], files)
            while self._hear(wait=True):
                if self._forked:
                    return self._forked.pop()
        words = self._log.read_text(errors="replace").strip().splitlines()[-1:]
        raise RunError(f"what is to start this run's processes has ended itself: {''.join(words)}")

    def ended(self, pid: int, *, wait: bool = False) -> int | None:
        """Once the exit code of a process; None while it lives.

        Where the server is gone nobody can know: it counts as killed, which the caller sees to.
        """
        while pid not in self._codes:
            if not self._hear(wait=wait):
                return -signal.SIGKILL
            if not wait:
                break
        return self._codes.pop(pid, None)

    def close(self) -> None:
        """End the server; what it has forked goes on."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._rest = b""
        self._forked.clear()
        self._codes.clear()

    def _hear(self, *, wait: bool) -> bool:
        """Take in what it has told; whether it is there."""
        if self._channel is None:
            return False
        try:
            told = self._channel.recv(4096, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except ConnectionError:
            told = b""
        if not told:
            self.close()
            return False
        *lines, self._rest = (self._rest + told).split(b"\n")
        for one in map(json.loads, lines):
            if "code" in one:
                self._codes[one["pid"]] = one["code"]
            else:
                self._forked.append(one["pid"])
        return True


def hold_signals() -> None:
    """In the server, before it imports: what ends others must not end it.

    Held back, and not ignored, so that a process hears what came before it could answer.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)


def await_fork() -> bool:
    """Be the server. Returns True in each process that is forked, and False when all is over."""
    gc.freeze()  # a collection would write to, and so copy, what the processes share
    channel, woken = socket.socket(fileno=os.dup(0)), os.pipe()
    os.set_blocking(woken[1], False)
    signal.set_wakeup_fd(woken[1])
    signal.signal(signal.SIGCHLD, lambda *_: None)  # one that is ignored would wake nobody
    while True:
        ready, _, _ = select.select([channel, woken[0]], [], [])
        if woken[0] in ready:
            os.read(woken[0], 4096)
            _tell_ended(channel)
        if channel not in ready:
            continue
        asked, files, _, _ = socket.recv_fds(channel, 1, MOST_FILES)
        if not asked:
            return False
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            channel.close()
            _become(files, woken)
            return True
        _close(files)
        _tell(channel, {"pid": pid})


def _become(files: Sequence[int], woken: Sequence[int]) -> None:
    """In a forked process: what makes it one of its own."""
    os.setsid()
    os.dup2(files[0], 0)
    os.dup2(files[1], 2)
    _close([*files[:2], *woken])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)


def _tell_ended(channel: socket.socket) -> None:
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            _tell(channel, {"pid": found[0], "code": os.waitstatus_to_exitcode(found[1])})


def _tell(channel: socket.socket, what: Json) -> None:
    with suppress(ConnectionError):  # who asked is gone: the next look sees it
        channel.sendall(json.dumps(what).encode() + b"\n")


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)
