"""Who leads the rows of table servers, told by messages of servers that are played here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from jaxdist.errors import RunError
from jaxdist.runtime.children import Event
from jaxdist.tables.training.team import TableTeam
from jaxdist.train.strategy.config import Hybrid
from jaxdist.wire.kept import Board, read_board, spec_of_board
from jaxdist.wire.local import LocalWire


class Played:
    """A server that follows its orders at once, until it is dead or silent."""

    def __init__(self, number: int, leads: int | None, events: Any, silent: bool) -> None:
        self.number, self.events, self.silent = number, events, silent
        self.led: set[int] = set()
        self.process = SimpleNamespace(kill=self.die)
        if leads is not None:
            self.lead(leads, 0)

    def __str__(self) -> str:
        return f"table {self.number}"

    def last_words(self) -> str:
        return ""

    def hear(self, **what: Any) -> None:
        self.events.put(Event(self, what))

    def close_input(self) -> None:
        self.silent = True

    def die(self) -> None:
        self.events.put(Event(self, {}, -9))

    def lead(self, at: int, epoch: int) -> None:
        self.led.add(at)
        self.hear(event="leads", range=at, server=self.number, port=100 + self.number, epoch=epoch)

    def say(self, what: Any) -> None:
        match what:
            case {"alive": _} if not self.silent:
                self.hear(event="alive")
            case {"follow": at}:
                self.hear(event="copies", range=at, server=self.number, port=200 + self.number)
            case {"view": [number, epoch, _, _, joining], "range": at}:
                if at not in self.led:
                    self.lead(at, epoch)
                if joining is not None:
                    self.hear(event="synced", range=at, server=joining, number=number)
            case {"count": _, "range": at}:
                self.hear(event="done", range=at, server=self.number)


@pytest.fixture
def team() -> Iterator[Callable[..., Any]]:
    made: list[TableTeam] = []

    def make(silent: tuple[int, ...] = (), **settings: Any) -> Any:
        played: dict[int, Played] = {}
        lines: list[str] = []

        def begin(number: int, leads: int | None, events: Any) -> Any:
            played[number] = Played(number, leads, events, number in silent)
            return played[number]

        made.append(TableTeam(Hybrid(**settings), begin, lines.append))
        made[-1].start()
        return made[-1], played, lines

    yield make
    for one in made:
        one.servers, one._left = {}, []  # there are no processes to wait for
        one.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_run_goes_on_without_servers_that_die_again_and_again(team: Any) -> None:
    found, played, lines = team(servers=3, replicas=2, processes={"deaths": 1})
    played[1].die()
    until(lambda: 3 in played and found.safe)
    assert found.leaders[1] == (102, 1)
    assert [one["server"] for one in found.ask({"count": 0})] == [0, 2, 2]
    for number in (3, 0):  # the second death in a row is one too many
        found._deaths = 1
        played[number].die()
        until(lambda number=number: number not in found.servers)
        until(lambda: len(found.servers) < 2 or found.safe)
    assert "no other server is started" in lines[-1]
    assert sorted(played) == [0, 1, 2, 3]
    assert [port for port, _ in found.leaders] == [102] * 3
    played[2].die()
    with pytest.raises(RunError, match=r"table 2 ended .* the rows that the server held are lost"):
        found.ask({"count": 0})


def test_a_server_that_does_not_answer_is_killed(team: Any) -> None:
    found, _, lines = team((0,), servers=2, replicas=2, takeover_seconds=0.2)
    until(lambda: found.leaders[0] == (101, 1))
    assert "table 0 has not answered for 0.2 s, and is killed" in lines


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_server_that_leaves_hands_its_rows_to_another(team: Any, replicas: int) -> None:
    """One after another, until no server is left of those that the run began with."""
    found, played, lines = team(servers=2, replicas=replicas)
    moves: list[tuple[int, int]] = []
    found.follow(lambda reason: None, lambda at, port, epoch: moves.append((at, port)))
    for number in (0, 1):
        for _ in range(2):  # The second request changes nothing.
            played[number].hear(event="leaves")
        until(lambda number=number: number not in found.servers)
        assert lines[-1] == f"table {number} leaves: table {2 + number} takes its place"
        assert played[number].silent
    until(lambda: all(port >= 102 for port, _ in found.leaders))
    assert found.failure is None
    until(lambda: replicas == 1 or found.safe)
    assert {one["server"] for one in found.ask({"count": 0})} <= {2, 3}
    assert all(number in found._seats for number in (2, 3))
    assert {at for at, port in moves if port >= 102} == {0, 1}
    assert sorted(played) == [0, 1, 2, 3]


def test_a_server_at_a_fixed_port_does_not_leave(team: Any) -> None:
    found, played, lines = team(servers=1, processes={"port": 4000})
    played[0].hear(event="leaves")
    until(lambda: bool(lines))
    assert "table 0 was asked to leave and stays" in lines[0]
    assert [*found.servers] == [0]


def test_a_server_that_fails_is_told(team: Any) -> None:
    found, played, _ = team(servers=1)
    played[0].hear(event="failed", error="no space")
    told: list[str] = []
    until(lambda: found.failure is not None)
    found.follow(told.append, lambda *moved: None)
    assert told == ["table 0: no space"]


def test_a_board_shows_its_text_and_every_change() -> None:
    board, seen, changed = Board("one"), list[str](), threading.Event()

    def see(text: str) -> None:
        seen.append(text)
        changed.set()

    kept = read_board(LocalWire(board, spec_of_board), see)
    assert changed.wait(10)
    board.show("two")
    until(partial(seen.__contains__, "two"))
    kept.close()
    assert seen == ["one", "two"]
