"""Table servers on other hosts: the lines between a server there and its parent here."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from jaxdist.errors import RunError, StoppedError
from jaxdist.runtime.children import Event
from jaxdist.tables.training import host as hosts
from jaxdist.tables.training.host import HostedProcess, await_gate, host_problem
from jaxdist.wire.children import RunProcess
from jaxdist.wire.config import ProcessesConfig
from jaxdist.wire.contract import Envelope, Op
from jaxdist.wire.frames import FrameError
from jaxdist.wire.gate import (
    Gate,
    GateAddress,
    RemoteProcess,
    read_gate,
    write_gate,
)
from jaxdist.wire.offers import Offers
from jaxdist.wire.rpc import RpcServer

TOKEN = "t" * 32
SECONDS = 20


class Forks:
    """What forks a server here: a thread, in place of its process, that says what it is told."""

    code, PID = 0, 2**31 - 1

    def __init__(self, module: str, log: Path, environ: Any) -> None:
        self.over = threading.Event()

    def await_imports(self) -> None: ...

    def close(self) -> None: ...

    def begin(self, stdin: int, stderr: int) -> Any:
        parent = socket.socket(fileno=os.dup(stdin))

        def serve() -> None:
            with parent, parent.makefile("rb") as lines:
                for line in lines:
                    parent.sendall(json.dumps({"event": "told", **json.loads(line)}).encode())
                    parent.sendall(b"\n")
            self.over.set()

        threading.Thread(target=serve, daemon=True).start()
        wait = lambda timeout=None: self.over.wait(timeout) and self.code  # noqa: E731
        return SimpleNamespace(pid=self.PID, wait=wait, kill=self.over.set)


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleQueue[RemoteProcess]]:
    """The hosts that have come to the gate of the run in `tmp_path`."""
    monkeypatch.setattr(hosts, "ForkServer", Forks)
    offers: SimpleQueue[RemoteProcess] = SimpleQueue()
    with ExitStack() as stack:
        rpc = RpcServer(Gate(offers.put), TOKEN)
        stack.callback(rpc.close)
        write_gate(tmp_path, GateAddress(f"127.0.0.1:{rpc.port}", TOKEN))
        yield offers


def offered(
    run: Path, host: str | None = None, *, stays: bool = False
) -> tuple[HostedProcess, threading.Thread, list[str]]:
    server = HostedProcess(run, ProcessesConfig(), host, module="", stays=stays)
    errors: list[str] = []

    def serve() -> None:
        try:
            server.serve()
        except RunError as error:
            errors.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    return server, thread, errors


def begun(run: Path, gate: Any) -> tuple[RunProcess, SimpleQueue[Event]]:
    """The server as the run sees it, which says first with what it was begun."""
    events: SimpleQueue[Event] = SimpleQueue()
    setup = {"run": {"id": "a", "path": "elsewhere"}, "token": "elsewhere", "number": 3}
    given: Any = {"begin": gate.get(timeout=SECONDS).begin, "log": run / "a.log", "events": events}
    return RunProcess("table", 3, setup, **given), events


@pytest.mark.parametrize("code", [0, 3])
def test_orders_and_events_pass_through_the_gate(
    tmp_path: Path, gate: Any, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(Forks, "code", code)
    server, thread, errors = offered(tmp_path, "127.0.0.2")
    child, events = begun(tmp_path, gate)
    told = events.get(timeout=SECONDS).what
    assert (told["role"], told["number"], told["host"]) == ("table", 3, "127.0.0.2")
    assert told["run"] == {"id": "a", "path": str(tmp_path)}
    assert Path(told["token"]).read_text() == TOKEN
    assert Path(told["token"]).stat().st_mode & 0o077 == 0
    child.say({"follow": 1})
    assert events.get(timeout=SECONDS).what == {"event": "told", "follow": 1}
    sent: list[Any] = []
    monkeypatch.setattr(hosts.os, "kill", lambda *given: sent.append(given))
    server.leave()
    child.close_input()
    assert events.get(timeout=SECONDS) == (child, {}, code)
    thread.join(SECONDS)
    assert sent == [(Forks.PID, signal.SIGTERM)]
    assert server.number == 3
    assert errors == ([f"table 3 of {tmp_path} ended with exit code 3."] if code else [])


def test_a_server_whose_session_ends_is_killed_on_both_sides(tmp_path: Path, gate: Any) -> None:
    _, thread, errors = offered(tmp_path)
    child, events = begun(tmp_path, gate)
    assert events.get(timeout=SECONDS).what["host"] == "127.0.0.1"
    child.process.kill()
    assert events.get(timeout=SECONDS).code == -9
    thread.join(SECONDS)
    assert len(errors) == 1
    assert "the connection to the run was lost" in errors[0]


def test_a_run_that_refuses_a_server_says_why(tmp_path: Path, gate: Any) -> None:
    _, thread, errors = offered(tmp_path)
    gate.get(timeout=SECONDS).refuse("too few ranges")
    thread.join(SECONDS)
    assert errors == [f"{tmp_path}: too few ranges"]


def test_a_command_that_is_stopped_before_its_turn(tmp_path: Path, gate: Any) -> None:
    server, thread, errors = offered(tmp_path)
    remote = gate.get(timeout=SECONDS)
    server.leave()
    thread.join(SECONDS)
    assert "was stopped before the run had a server" in errors[0]
    assert remote.wait(SECONDS) == -9
    events: SimpleQueue[Event] = SimpleQueue()
    given: Any = {"begin": remote.begin, "log": tmp_path / "a.log", "events": events}
    child = RunProcess("table", 3, {}, **given)
    assert events.get(timeout=SECONDS) == (child, {}, -9)


def test_a_server_of_a_job_stays_until_the_run_ends_it(
    tmp_path: Path, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(hosts.os, "kill", lambda *given: sent.append(given))
    server, thread, errors = offered(tmp_path, stays=True)
    child, events = begun(tmp_path, gate)
    assert events.get(timeout=SECONDS).what["stays"] is True
    server.leave()
    child.close_input()
    thread.join(SECONDS)
    assert (sent, errors) == ([], [])


def test_a_server_waits_for_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "run.lock"
    with pytest.raises(RunError, match=r"no run in .* has taken a server .* within 0\.3 s: see"):
        await_gate(tmp_path, lock, 0.3)
    monkeypatch.setattr(hosts, "ENDED_SECONDS", 0.0)
    held = iter([True, True])
    lock_of_a_run: Any = SimpleNamespace(exists=lambda: next(held, False))
    with pytest.raises(RunError, match="has ended before it took a server of this host"):
        await_gate(tmp_path, lock_of_a_run, SECONDS)


@pytest.mark.parametrize(
    ("run_host", "host", "reason"),
    [
        ("127.0.0.1", "127.0.0.2", None),
        ("10.0.0.1", "10.0.0.2", None),
        ("127.0.0.1", "10.0.0.2", "127.0.0.1 is reached on one machine only"),
        ("10.0.0.1", "127.0.0.2", "other hosts cannot reach 127.0.0.2: give --host"),
    ],
)
def test_addresses_that_the_others_cannot_reach(
    run_host: str, host: str, reason: str | None
) -> None:
    settings = ProcessesConfig.model_construct(host=run_host)
    found = host_problem(settings, host)
    assert found is None if reason is None else found is not None and reason in found


def test_a_run_without_a_gate(tmp_path: Path, gate: Any) -> None:
    write_gate(tmp_path, GateAddress("127.0.0.1:1", TOKEN))
    with pytest.raises(RunError, match=r"no process of the run answers at 127\.0\.0\.1:1: "):
        HostedProcess(tmp_path, ProcessesConfig(), None, module="")
    with pytest.raises(RunError, match=r"127\.0\.0\.1 is reached on one machine only"):
        HostedProcess(tmp_path, ProcessesConfig(), "10.0.0.2", module="")
    (tmp_path / "gate.json").write_text("{}")
    with pytest.raises(RunError, match="has no address at which the run takes servers"):
        read_gate(tmp_path)
    with pytest.raises(RunError, match=r"gate\.json cannot be written: .*make room on the disk"):
        write_gate(tmp_path / "absent", GateAddress("", ""))


def test_a_host_sends_texts_only() -> None:
    with pytest.raises(FrameError, match="a host may not send PULL"):
        Gate(lambda remote: None).spec(Envelope(Op.PULL))


def test_a_host_that_the_run_does_not_need(tmp_path: Path, gate: Any) -> None:
    server, thread, errors = offered(tmp_path)
    gate.get(timeout=SECONDS).release()
    thread.join(SECONDS)
    assert (server.spared, errors) == (True, [])


class Offered(SimpleNamespace):
    """A process that a host has offered."""

    def refuse(self, reason: str) -> None:
        self.reason = reason

    def release(self) -> None:
        self.released = True


def test_a_run_with_parameter_servers_takes_what_hosts_offer() -> None:
    offers, lines = Offers({"server": 1, "worker": 1}), list[str]()
    roles = "server", "server", "server", "worker", "worker"
    given: list[Any] = [Offered(role=role, gone=not at) for at, role in enumerate(roles)]
    gone, first, more, worker, spare = given
    for one in gone, first, more, worker, spare:
        offers.offer(one)
    assert (
        more.reason
        == "the run already has all of its servers: raise strategy.servers to use this host"
    )
    offers.gather(lines.append, SECONDS, lambda: False)
    assert lines == ["waiting for 1 servers of other hosts", "waiting for 1 workers of other hosts"]
    assert (offers.take("server"), offers.take("worker")) == (first, worker)
    assert offers.take("server") is offers.take("aggregator") is None
    offers.close()
    assert spare.released


def test_a_run_with_parameter_servers_waits_in_vain() -> None:
    with pytest.raises(RunError, match="only 0 of 2 workers of other hosts have come within 0"):
        Offers({"server": 0, "worker": 2}).gather(print, 0.0, lambda: False)
    with pytest.raises(StoppedError, match="was asked to stop while it waited for servers"):
        Offers({"server": 2, "worker": 0}).gather(print, SECONDS, lambda: True)
