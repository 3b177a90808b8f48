"""The gate of a run: the port at which commands on other hosts offer to start its processes.

RUN/gate.json    {"address": "10.0.0.1:40001", "token": "..."}, which only the run's owner may read

The session of a host carries texts in both directions. The first text of the host is {"host":
ADDRESS, "role": "server" or "worker"}. The answer is {"refused": REASON}, or the setup of a server
or a worker. Afterwards the texts to the host are orders to this process, and the texts from the
host are events of this process, as between a parent and a child (`jaxdist.runtime.children`). An
empty text ends the process, or tells the host that the run ends without a need for the process. The
last text of the host is {"code": EXIT_CODE}. Each text from the host is a line. A text to the host
may contain several lines or end within a line.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdist.config.files import read_json
from jaxdist.errors import RunError, os_errors_as
from jaxdist.types import Json
from jaxdist.wire.config import ProcessesConfig
from jaxdist.wire.contract import Envelope, Op, Peer, Spec
from jaxdist.wire.frames import TEXT_BYTES, StrictService
from jaxdist.wire.kept import spec_of_board
from jaxdist.wire.ports import place_address
from jaxdist.wire.rpc import RpcServer
from jaxdist.wire.security import read_tls, write_private

FILE_NAME = "gate.json"


class GateAddress(NamedTuple):
    """The address at which a run accepts processes of other hosts, and the token for this address.

    Attributes:
      devices: the number of fake CPU devices of a server's process, or None if it needs none.
    """

    address: str
    token: str
    devices: int | None = None


def write_gate(run: Path, gate: GateAddress) -> Path:
    """Write the file with the address of a gate, and return the path of the file.

    Raises:
      RunError: the file cannot be written.
    """
    path = run / FILE_NAME
    with os_errors_as(
        RunError,
        f"{path} cannot be written",
        "make room on the disk, or allow this user to write there",
    ):
        path.unlink(missing_ok=True)  # A run that was killed leaves its gate file behind.
        write_private(path, json.dumps(gate._asdict()))
    return path


def read_gate(run: Path) -> GateAddress:
    """Return the address at which a training run accepts processes of other hosts.

    Raises:
      RunError: the run has no gate that this user can read.
    """
    path = run / FILE_NAME
    try:
        return GateAddress(**read_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(
            f"{path} has no address at which the run takes servers of other hosts ({error}): wait "
            "until the run has started its table servers, and use the account of the run"
        ) from error


def too_few(found: int, wanted: int, what: str, seconds: float) -> str:
    """Return the message of a run that has waited in vain for processes of other hosts.

    Args:
      found, wanted: the numbers of processes that have come, and that the run needs.
      what: the kind of the processes, in the plural.
      seconds: the time that the run has waited, in seconds.
    """
    return (
        f"only {found} of {wanted} {what} of other hosts have come within {seconds:g} s "
        "(strategy.processes.deadline_seconds): read the logs of the other hosts, on which "
        f"`jaxdist launch` or you start the {what}"
    )


def text_of(what: Json) -> Envelope:
    """Return an envelope with a JSON value as a line."""
    return _envelope(json.dumps(what).encode() + b"\n")


def _envelope(text: bytes) -> Envelope:
    return Envelope(Op.WAITING, payload=np.frombuffer(text, np.uint8))


class RemoteProcess:
    """A process on another host with the methods of a process of this host.

    The object is a `jaxdist.runtime.children.PipedProcess`. It also has the method `begin` of a
    fork server, which here returns the object itself. The lines between the process and its parent
    pass through the session of the host.

    Attributes:
      host: the address at which the process listens.
      role: "server" or "worker".
    """

    def __init__(self, peer: Peer, host: str, role: str = "server") -> None:
        # A process of another host has no process number here, so `pid` has a number that no
        # process has.
        self.host, self.role, self.pid = host, role, 2**31 - 1
        self._peer, self._code = peer, -int(signal.SIGKILL)
        self._over = threading.Event()
        self._parent: socket.socket | None = None

    @property
    def gone(self) -> bool:
        """Whether the process or its session has ended."""
        return self._over.is_set()

    def refuse(self, reason: str) -> None:
        """Report to the host why the run does not take the process."""
        self._peer.say(text_of({"refused": reason}))

    def release(self) -> None:
        """Tell the host that the run ends without a need for its process."""
        self._peer.say(_envelope(b""))

    def begin(self, stdin: int, stderr: int) -> RemoteProcess:
        """Begin to pass the lines of the parent on to the host, and return this object.

        Args:
          stdin: the descriptor that a process of this host would have as its standard input.
          stderr: the descriptor of the log, which the host opens itself.
        """
        del stderr
        self._parent = socket.socket(fileno=os.dup(stdin))
        if self.gone:
            self._wake()
        threading.Thread(target=self._pass_on, args=[self._parent], daemon=True).start()
        return self

    def _pass_on(self, parent: socket.socket) -> None:
        # After the last order, the socket stays open for the events of the process until the
        # process has ended.
        with parent, suppress(OSError):
            # Each message has all lines that have arrived since the last message, because a peer
            # with too many unsent messages is disconnected.
            while text := parent.recv(TEXT_BYTES):
                self._peer.say(_envelope(text))
            self._peer.say(_envelope(b""))
            self._over.wait()

    def hear(self, text: str) -> None:
        """Pass a text from the host on to the parent, or record a reported exit code."""
        told = json.loads(text)
        if "code" in told:
            self.ended(told["code"])
            self._peer.close()
        elif self._parent is not None:
            with suppress(OSError):
                self._parent.sendall(text.encode())

    def ended(self, code: int = -int(signal.SIGKILL)) -> None:
        """Record that the process has ended, with the exit code `code`.

        The method is also called at the end of the session, when the host kills the process.
        """
        if not self.gone:
            self._code = code
            self._over.set()
            self._wake()

    def _wake(self) -> None:
        if self._parent is not None:
            with suppress(OSError):
                self._parent.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout: float | None = None, /) -> int:
        """Wait for the end of the process, and return its exit code.

        Raises:
          subprocess.TimeoutExpired: the process is alive after `timeout` seconds.
        """
        if not self._over.wait(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"the server on {self.host}", timeout)
        return self._code

    def kill(self) -> None:
        """End the session; the host then kills the process."""
        self._peer.close()
        self.ended()


def open_gate(
    run: Path,
    settings: ProcessesConfig,
    token: str,
    offered: Callable[[RemoteProcess], None],
    stack: ExitStack,
    *,
    devices: int | None = None,
) -> None:
    """Let other hosts offer to start processes, until the stack closes.

    Args:
      settings: the settings of the run's processes, with the address of this host.
      offered: the argument of `Gate`.
      devices: the number of fake devices in `GateAddress`.
    """
    tls = read_tls(settings.tls)
    rpc = RpcServer(Gate(offered), token, host=settings.host, tls=tls)
    stack.callback(rpc.close)
    address = place_address(settings.host, rpc.port)
    path = write_gate(run, GateAddress(address, token, devices))
    stack.callback(partial(path.unlink, missing_ok=True))


class Gate(StrictService):
    """A `jaxdist.wire.contract.Service` for the hosts that offer to start servers or workers.

    Args:
      offered: the function that is called with the `RemoteProcess` of each new host. The function
        decides when to begin or refuse this process.
    """

    sender = "a host"

    def __init__(self, offered: Callable[[RemoteProcess], None]) -> None:
        self._offered = offered
        self._remotes: dict[Peer, RemoteProcess] = {}

    def spec(self, envelope: Envelope) -> Spec | None:
        if envelope.op is not Op.WAITING:
            raise self.unexpected(envelope)
        return spec_of_board(envelope)

    def receive(self, peer: Peer, envelope: Envelope) -> None:
        known = self._remotes.get(peer)
        if known is not None:
            known.hear(envelope.text)
            return
        remote = RemoteProcess(peer, **json.loads(envelope.text))
        self._remotes[peer] = remote
        self._offered(remote)

    def left(self, peer: Peer) -> None:
        remote = self._remotes.pop(peer, None)
        if remote is not None:
            remote.ended()
