from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from jaxdist.errors import RunError
from jaxdist.runtime import rendezvous
from jaxdist.runtime.rendezvous import Wait, free_port, meet


class Outcome:
    """What came of a process, in a thread."""

    def __init__(self, task: Callable[[], None]) -> None:
        self.error: Exception | None = None
        self._task = task
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._task()
        except Exception as error:
            self.error = error

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> str | None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return None if self.error is None else f"{type(self.error).__name__}: {self.error}"


class Program:
    """Processes that meet on one port; those that come after process 0 find jax's port open."""

    def __init__(self, count: int, *, seconds: float = 10.0) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.count, self.seconds = count, seconds
        self.said: list[str] = []
        self.jax: socket.socket | None = None

    def close(self) -> None:
        assert self.jax is not None
        self.jax.close()

    def start(self, index: int, *, count: int | None = None) -> Outcome:
        def task() -> None:
            meet(
                self.address,
                count or self.count,
                index,
                bind=self.address,
                seconds=self.seconds,
                say=self.said.append,
            )
            if index == 0:
                port = rendezvous.split_address(self.address)[1]
                self.jax = socket.create_server(("127.0.0.1", port))

        return Outcome(task)


@pytest.fixture(autouse=True)
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "FIRST_WORD_SECONDS", 0.0)
    monkeypatch.setattr(rendezvous, "_RETRY_SECONDS", 0.01)


def test_all_come_in_any_order_and_the_port_is_free_again() -> None:
    program = Program(4)
    others = [program.start(index) for index in (3, 1)]
    first = program.start(0)
    others.append(program.start(2))
    assert [process.join() for process in (first, *others)] == [None] * 4
    program.close()


def test_those_who_miss_are_named_to_all() -> None:
    program = Program(5, seconds=1.0)
    outcomes = [program.start(index).join for index in (0, 2)]
    said = [outcome() for outcome in outcomes]
    assert said[0] is not None
    assert said[0].startswith(f"RunError: 2 of 5 processes joined {program.address} within 1 s")
    assert "missing: 1, 3, 4. Read" in said[0]
    assert "--join-timeout SECONDS" in said[0]
    assert said[1] == said[0]
    assert f"waiting for {program.address} (1 of 5 processes)" in program.said


def test_one_that_went_away_may_come_again() -> None:
    program = Program(3)
    first = program.start(0)
    with connected_to(program) as lost:
        lost.sendall(b"jaxdist process 1 of 3\n")
    others = [program.start(index) for index in (1, 2)]
    assert [process.join() for process in (first, *others)] == [None] * 3
    program.close()


def connected_to(program: Program) -> socket.socket:
    while True:
        with suppress(OSError):
            return socket.create_connection(rendezvous.split_address(program.address))


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\n\r\n", b"\n", b"x" * 5000, b""])
def test_strangers_are_sent_away(greeting: bytes) -> None:
    program = Program(2)
    first = program.start(0)
    with connected_to(program) as stranger:
        stranger.sendall(greeting)
        with suppress(OSError):  # sent away already
            stranger.shutdown(socket.SHUT_WR)
        second = program.start(1)
        assert (first.join(), second.join()) == (None, None)
    program.close()


def test_contradictions_are_told_to_the_newcomer() -> None:
    program = Program(3)
    first, second = program.start(0), program.start(1)
    wrong = program.start(2, count=4).join()
    assert wrong == (
        "RunError: process 2 was started with a count of 4 processes, but process 0 with a count "
        "of 3: give all processes the same --num-processes"
    )
    twins = [second, program.start(1)]
    while all(twin.alive for twin in twins):
        time.sleep(0.01)
    refused = (
        "RunError: another process with the number 1 has already joined: use a different "
        "--process-id for each process"
    )
    assert [twin.join() for twin in twins if not twin.alive] == [refused]
    third = program.start(2)
    assert {process.join() for process in (first, *twins, third)} == {None, refused}
    program.close()


@pytest.mark.parametrize("index", [0, 1])
def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    said: list[str] = []
    with pytest.raises(RunError, match=r"node7:99.*: Name or service not known \(tried for 0.1 s"):
        meet("node7:99", 2, index, bind="[::]:99", seconds=0.1, say=said.append)
    assert said[0].startswith("waiting for node7:99 (")
    assert said[0].endswith("): Name or service not known")
    assert len(said) == 1


def test_process_0_that_never_comes() -> None:
    program = Program(2, seconds=0.1)
    said = program.start(1).join()
    assert said is not None
    assert f"process 1 of 2 cannot reach process 0 at {program.address}: Connection ref" in said


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            RunError, match=rf"cannot listen on {address}: .*in use.*; choose a free"
        ):
            meet(address, 2, 0, bind=address, seconds=1, say=pytest.fail)


def test_a_word_comes_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    said: list[str] = []
    monkeypatch.setattr(rendezvous, "FIRST_WORD_SECONDS", 5.0)
    wait = Wait(300, said.append, lambda: seconds[0])
    for second in range(100):
        seconds[0] = float(second)
        wait.tell(str(second))
    assert said == ["5", "35", "65", "95"]
