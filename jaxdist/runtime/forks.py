"""A fork server: processes forked from a process that has already imported everything.

The imports that training needs take several seconds of CPU time in each process. A fork takes
milliseconds and shares the memory. The server has no threads of its own and has started no backend,
so its forks behave as if they had imported everything themselves. The server answers on its
standard input, which is a socket.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from jaxdist.errors import RunError
from jaxdist.runtime.children import last_lines
from jaxdist.runtime.environment import python_module
from jaxdist.types import Json

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""The signals that a scheduler sends to all processes of a job. The fork server blocks these
signals; the agent and the forked processes handle them."""
MOST_FILES = 8
POLL_SECONDS = 0.01


class ForkServer:
    """The client of a fork server, from `start` before the first fork to `close` at the end.

    Args:
      module: a module that calls `hold_signals`, imports, and then calls `await_fork`.
      log: the file for the server's standard error.
      environ: the server's environment; None takes the environment of this process.
    """

    def __init__(self, module: str, log: Path, environ: Mapping[str, str] | None = None) -> None:
        self._module, self._log, self._environ = module, log, environ
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._rest, self._forked = b"", list[int]()
        self._codes: dict[int, int] = {}
        self.lock = threading.Lock()

    def start(self) -> None:
        """Start the fork server, which imports modules while the caller continues."""
        self.close()
        self._channel, theirs = socket.socketpair()
        with theirs, self._log.open("ab") as errors:
            # The server has a separate session, so that signals of the terminal reach it only
            # through the caller.
            self._process = subprocess.Popen(
                python_module(self._module),
                stdin=theirs.fileno(),
                stderr=errors,
                env=None if self._environ is None else {**self._environ},
                start_new_session=True,
            )

    def fork(self, files: Sequence[int]) -> int:
        """Fork a process, and return its id as soon as the process exists.

        Args:
          files: the descriptors of the new process's standard input and standard error, and any
            other descriptors that it keeps open.

        Returns:
          The id of the process, which leads a session.

        Raises:
          RunError: the fork server did not start.
        """
        for _ in range(2):  # A server that has ended since the last fork is restarted once.
            if self._channel is None:
                self.start()
            assert self._channel is not None
            with suppress(OSError):  # `_hear` notices that the server has ended.
                socket.send_fds(self._channel, [b"."], files)
            while self._hear(wait=True):
                if self._forked:
                    return self._forked.pop()
        words = last_lines(self._log, 1)
        raise RunError(
            f"the process that starts this run's processes has ended: {words}; start the run again"
        )

    def await_imports(self) -> None:
        """Wait until the fork server has imported its modules, so that later forks begin at once.

        Raises:
          RunError: the fork server did not start.
        """
        with open(os.devnull, "r+b") as nothing:  # The forked process gets no setup, and ends.
            self.begin(nothing.fileno(), nothing.fileno()).wait()

    def begin(self, stdin: int, stderr: int) -> Forked:
        """Fork a process, and return an object with which several threads may wait for its end.

        Args:
          stdin, stderr: the descriptors of the process's standard input and standard error.

        Raises:
          RunError: the fork server did not start.
        """
        with self.lock:
            return Forked(self, self.fork([stdin, stderr]))

    def ended(self, pid: int) -> int | None:
        """Return the exit code of a process that has ended, or None while the process is alive.

        If the server is gone, the exit code is unknown, and the result is the exit code of SIGKILL:
        the caller has to kill the process. After a call has returned the exit code, do not call
        this method for the process again.
        """
        if pid not in self._codes and not self._hear(wait=False):
            return -signal.SIGKILL
        return self._codes.pop(pid, None)

    def close(self) -> None:
        """End the fork server; the forked processes continue."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            # The server can be killed, because it has no state to save, and its forks do not depend
            # on it.
            self._process.kill()
            self._process.wait()
        self._rest = b""
        self._forked.clear()
        self._codes.clear()

    def _hear(self, *, wait: bool) -> bool:
        """Receive the fork server's messages; return whether the fork server is alive."""
        if self._channel is None:
            return False
        try:
            # With MSG_DONTWAIT only this call is non-blocking; `send_fds` needs a blocking socket.
            told = self._channel.recv(4096, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except ConnectionError:
            told = b""
        if not told:
            self.close()
            return False
        # A stream has no message boundaries, so the rest of the last line may arrive with the next
        # call.
        *lines, self._rest = (self._rest + told).split(b"\n")
        for one in map(json.loads, lines):
            if "code" in one:
                self._codes[one["pid"]] = one["code"]
            else:
                self._forked.append(one["pid"])
        return True


class Forked:
    """A forked process with methods of `subprocess.Popen`, which several threads may share."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid, self._server = pid, server
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code of the process, or None while the process lives."""
        with self._server.lock:
            if self.returncode is None:
                # `ended` returns an exit code only once, so it is stored for all threads.
                self.returncode = self._server.ended(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, and return its exit code.

        Raises:
          subprocess.TimeoutExpired: the process is alive after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and timeout is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process if the process lives."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the process if the process lives."""
        self.send_signal(signal.SIGKILL)


def hold_signals() -> None:
    """Block signals in the fork server, before it imports modules, so that no signal ends it.

    The signals are blocked rather than ignored, so that a forked process still receives a signal
    that arrived before it installed its handler.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)


def await_fork() -> bool:
    """Run the fork server. Return True in each forked process, and False when the server ends."""
    gc.freeze()  # A garbage collection would copy the memory that the processes share.
    channel, woken = socket.socket(fileno=os.dup(0)), os.pipe()
    # `set_wakeup_fd` requires a non-blocking pipe: a handler must not block on a full pipe.
    os.set_blocking(woken[1], False)
    signal.set_wakeup_fd(woken[1])
    signal.signal(signal.SIGCHLD, lambda *_: None)  # An ignored signal would not wake the loop.
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
            # The pipe belongs to the server: signals of the child must not wake it.
            signal.set_wakeup_fd(-1)
            channel.close()
            _become(files, woken)
            return True
        _close(files)
        _tell(channel, {"pid": pid})


def _become(files: Sequence[int], woken: Sequence[int]) -> None:
    """Make a forked process independent of the fork server.

    Args:
      files: the descriptors of the process's standard input and standard error, and other
        descriptors that it keeps open.
      woken: the descriptors of the server's pipe, which the process closes.
    """
    # The process gets a separate session, so that `killpg` reaches exactly the processes that it
    # starts.
    os.setsid()
    os.dup2(files[0], 0)
    os.dup2(files[1], 2)
    _close([*files[:2], *woken])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # This call comes last, because it delivers pending signals: the process is now independent.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)


def _tell_ended(channel: socket.socket) -> None:
    with suppress(ChildProcessError):
        # Several children may end for one SIGCHLD, because pending signals of a kind are merged.
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            _tell(channel, {"pid": found[0], "code": os.waitstatus_to_exitcode(found[1])})


def _tell(channel: socket.socket, what: Json) -> None:
    with suppress(ConnectionError):  # The client is gone, which the next read notices.
        channel.sendall(json.dumps(what).encode() + b"\n")


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)
