"""A server or a worker on this host, for a run that another host trains (see `gate`)."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from jaxdist.checkpoint.identity import CONFIG
from jaxdist.errors import RunError, StoppedError, os_errors_as
from jaxdist.runtime.children import Event
from jaxdist.runtime.environment import plan_environment
from jaxdist.runtime.forks import ForkServer
from jaxdist.types import Json, JsonObject
from jaxdist.wire.children import RunProcess
from jaxdist.wire.config import OWN_NAME, ProcessesConfig, address_here, stays_on_machine
from jaxdist.wire.contract import Envelope
from jaxdist.wire.gate import GateAddress, read_gate, text_of
from jaxdist.wire.kept import spec_of_board
from jaxdist.wire.rpc import CONNECT_SECONDS, RpcWire
from jaxdist.wire.security import read_tls, write_private

POLL_SECONDS = 0.2
ENDED_SECONDS = 5.0
"""The seconds without a lock after which a run counts as ended. A run that begins may briefly have
no lock while it replaces its lock.
"""


def host_problem(settings: ProcessesConfig, host: str) -> str | None:
    """Return why a server of a run cannot listen on an address, or None if it can."""
    if stays_on_machine(settings.host) and not stays_on_machine(host):
        return (
            f"strategy.processes.host {settings.host} is reached on one machine only, but the new "
            f"server would listen on {host}: start the run with the network address of its own "
            "host, and with certificates (strategy.processes.tls)"
        )
    if stays_on_machine(host) and not stays_on_machine(settings.host):
        return (
            f"other hosts cannot reach {host}: give --host the network address of this host, which "
            "its certificate names"
        )
    return None


def own_address(gate: GateAddress) -> str:
    """Return the address from which this host reaches a gate.

    Raises:
      RunError: the gate cannot be reached.
    """
    host, _, port = gate.address.rpartition(":")
    with os_errors_as(
        RunError,
        f"no process of the run answers at {gate.address}",
        "check that the run is training, and that no firewall blocks the port",
    ):
        given = host.strip("[]"), int(port)
        with socket.create_connection(given, timeout=CONNECT_SECONDS) as connection:
            return str(connection.getsockname()[0])


def await_gate(run: Path, lock: Path, seconds: float) -> None:
    """Wait until a run takes servers of other hosts.

    Args:
      lock: the lock of the run directory, which exists while a process trains in the directory.
      seconds: the largest time to wait, in seconds.

    Raises:
      RunError: the time is over, or the run has ended without taking servers.
    """
    deadline = time.monotonic() + seconds
    held = gone = None
    while True:
        try:
            own_address(read_gate(run))
            return
        except RunError as error:
            reason = str(error)
        now = time.monotonic()
        if lock.exists():
            held, gone = now, None
        elif held is not None:
            gone = gone or now
        if gone is not None and now - gone > ENDED_SECONDS:
            raise RunError(
                f"the run in {run} has ended before it took a server of this host: see its log"
            )
        if now > deadline:
            raise RunError(
                f"no run in {run} has taken a server of this host within {seconds:g} s: see the "
                f"log of the processes that train, and let all hosts share the folder. {reason}"
            )
        time.sleep(POLL_SECONDS)


class HostedProcess:
    """A server or a worker that a command on this host starts and ends for a run.

    Args:
      run: the run directory, as this host sees it.
      settings: the settings of the run's processes.
      host: the address at which the server listens. None means the name of this host if the run's
        address is `auto`, and otherwise the address from which this host reaches the run.
      role: "server", for a table server or a parameter server, or "worker".
      stays: whether SIGTERM leaves the process in the run until the run ends it.
      module: the Python module whose process forks the new process (`jaxdist.runtime.forks`).

    Attributes:
      host: the address at which the server listens.
      number: the number of the process, or None before the run has accepted it.
      name: the name of the process in the run.
      spared: whether the run has ended without a need for the process.

    Raises:
      RunError: the run has no gate, or cannot use a server at this address.
    """

    def __init__(
        self,
        run: Path,
        settings: ProcessesConfig,
        host: str | None,
        *,
        module: str,
        role: Literal["server", "worker"] = "server",
        stays: bool = False,
    ) -> None:
        gate = read_gate(run)
        if host is None and settings.host == OWN_NAME:
            host = address_here(OWN_NAME)
        self.run, self.host = run, host or own_address(gate)
        self.role, self.stays = role, stays
        problem = host_problem(settings, self.host)
        if problem is not None:
            raise RunError(f"{run}: {problem}")
        self.number: int | None = None
        self.name = f"this {role}"
        self.spared = False
        self._gate, self._module = gate, module
        self._tls = read_tls(settings.tls)
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._rest = ""
        self._server: RunProcess | None = None

    def leave(self) -> None:
        """Ask the server to leave the run once other servers have its rows."""
        self._events.put(Event(None, {"leave": True}))

    def serve(self) -> None:
        """Start the process, and return when the run has ended the process.

        Raises:
          RunError: the run refuses the process, or the process or the connection to the run failed.
        """
        wire = RpcWire(self._gate.address, self._gate.token, spec_of_board, self._tls)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxdist-")))
            token = folder / "token"
            write_private(token, self._gate.token)
            environ = None
            if self._gate.devices and self.role == "server":
                # A server computes on the CPU, in a mesh of the workers' shape.
                planned = plan_environment(dict(os.environ), fake_devices=self._gate.devices)
                environ = {**os.environ, **planned}
            forks = ForkServer(self._module, self.run / "logs" / "forks.log", environ)
            stack.callback(forks.close)
            # The imports are complete before the offer, because a server that the run has accepted
            # must answer soon.
            forks.await_imports()
            session = wire.open(
                self._hear, lambda reason: self._events.put(Event(None, {"lost": reason}))
            )
            stack.callback(session.close)
            stack.callback(self._kill)
            session.send(text_of({"host": self.host, "role": self.role}))
            code: int | None = None
            while not self.spared:
                event = self._events.get()
                if event.child is not None:
                    code = event.code
                    session.send(text_of(event.what if code is None else {"code": code}))
                elif "lost" in event.what:
                    self._check_end(code, event.what["lost"])
                    return
                else:
                    self._follow(event.what, forks, token)

    def _hear(self, envelope: Envelope) -> None:
        """Queue the complete orders in a text from the run, and keep an incomplete last line."""
        if not envelope.text:
            self._events.put(Event(None, {"order": None}))
        *lines, self._rest = (self._rest + envelope.text).split("\n")
        for line in lines:
            self._events.put(Event(None, {"order": json.loads(line)}))

    def _follow(self, what: JsonObject, forks: ForkServer, token: Path) -> None:
        """Pass an order from the run to the process, or ask the process to leave.

        The first order starts the process. An order of None ends the process.
        """
        server = self._server
        if "leave" in what:
            if server is None:
                raise StoppedError(
                    f"{self.run}: the command was stopped before the run had a server"
                )
            if self.stays:
                return
            with suppress(ProcessLookupError):
                os.kill(server.process.pid, signal.SIGTERM)
            return
        told: Json = what["order"]
        if server is None and told is None:
            self.spared = True
        elif server is None:
            self._server = self._begun(told, forks, token)
        elif told is None:
            server.close_input()
        else:
            server.say(told)

    def _begun(self, setup: Any, forks: ForkServer, token: Path) -> RunProcess:
        if "refused" in setup:
            raise RunError(f"{self.run}: {setup['refused']}")
        role, number, run = setup["role"], setup["number"], self.run.absolute()
        self.number, self.name = number, f"{role} {number}"
        own = {"run": {**setup["run"], "path": str(run)}, "token": str(token)}
        if "config" in setup:
            own["config"] = str(run / CONFIG)
        log = self.run / "logs" / f"{role}_{number}.log"
        given = {**setup, **own, "host": self.host, "stays": self.stays}
        return RunProcess(role, number, given, begin=forks.begin, log=log, events=self._events)

    def _kill(self) -> None:
        if self._server is not None:
            self._server.kill()

    def _check_end(self, code: int | None, reason: str) -> None:
        if code is None:
            raise RunError(
                f"{self.run}: the connection to the run was lost ({reason}), and {self.name} of "
                "this host has ended: see the log of the run"
            )
        if code:
            assert self._server is not None
            raise RunError(
                f"{self._server} of {self.run} ended with exit code {code}. "
                f"{self._server.last_words()}".strip()
            )
