"""Who leads the rows of table servers, told by messages of servers that are played here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.param_server.local_wire import LocalWire
from jaxdist.errors import RunError
from jaxdist.runtime.children import Event
from jaxdist.tables.training.team import TableTeam
from jaxdist.train.strategy.config import Hybrid
from jaxdist.wire.contract import WireError
from jaxdist.wire.kept import Board, KeptSession, read_board, spec_of_board


class Played:
    """A server that follows its orders at once, until it is dead or silent."""

    def __init__(self, number: int, leads: list[int], events: Any, silent: bool) -> None:
        self.number, self.events, self.silent = number, events, silent
        self.copies = True
        self.led: set[int] = set()
        self.process = SimpleNamespace(kill=self.die)
        for at in leads:
            self.lead(at, 0)

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
            case {"follow": at} if self.copies:
                self.led.discard(at)
                self.hear(event="copies", range=at, server=self.number, port=200 + self.number)
            case {"view": [number, epoch, _, _, joining], "range": at}:
                if at not in self.led:
                    self.lead(at, epoch)
                if joining is not None:
                    self.hear(event="synced", range=at, server=joining, number=number)
            case {"drop": at}:
                self.led.discard(at)
            case {"count": _, "range": at}:
                self.hear(event="done", range=at, server=self.number)


@pytest.fixture
def team() -> Iterator[Callable[..., Any]]:
    made: list[TableTeam] = []

    def make(
        silent: tuple[int, ...] = (),
        wanted: Any = lambda: None,
        stuck: tuple[int, ...] = (),
        offers: tuple[Any, ...] = (),
        **settings: Any,
    ) -> Any:
        played: dict[int, Played] = {}
        lines: list[str] = []
        hosts: dict[int, Any] = {}

        def begin(number: int, leads: list[int], events: Any, remote: Any) -> Any:
            hosts[number] = remote and remote.host
            played[number] = Played(number, leads, events, number in silent)
            played[number].copies = number not in stuck
            return played[number]

        made.append(TableTeam(Hybrid(**settings), begin, lines.append, wanted))
        made[-1].hosts = hosts
        for one in offers:
            made[-1].offer(one)
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


@pytest.mark.parametrize("replicas", [1, 2])
def test_servers_that_join_and_leave_share_the_ranges(team: Any, replicas: int) -> None:
    """From 2 servers to 3, to 5, and back to 2: each has its share, and no other range moves."""
    wanted: list[int] = []
    found, played, lines = team(
        servers=2, ranges=12, replicas=replicas, wanted=lambda: wanted.pop() if wanted else None
    )
    begun = [port for port, _ in found.leaders]
    for count in (3, 5, 2):
        before = dict(enumerate(found.leaders))
        wanted.append(count)
        until(lambda count=count: lines and f"to {count}" in "".join(lines[-2:-1]))
        until(lambda: "the ranges of rows have passed on" in lines[-1])
        until(lambda: all(port for port, _ in found.leaders) and (replicas == 1 or found.safe))
        assert len(found.servers) == count == len(found._seats)
        shares = [len(one) for one in found._seats.values()]
        assert sum(shares) == 12 * replicas
        assert max(shares) - min(shares) <= replicas, shares
        ports = [port for port, _ in found.leaders]
        leads = [ports.count(100 + one) for one in found.servers]
        assert count == 2 or max(leads) - min(leads) <= (1 if count == 3 else 2), leads
        if count == 3:
            moved = [at for at, port in enumerate(ports) if port != begun[at]]
            assert len(moved) == 4 == ports.count(102)
        assert {one["server"] for one in found.ask({"count": 0})} <= {*found.servers}
        assert before != dict(enumerate(found.leaders))
    assert found.failure is None
    assert all(one.silent for number, one in played.items() if number not in found.servers)


def test_a_number_of_servers_that_a_run_cannot_have_changes_nothing(team: Any) -> None:
    wanted = [5]
    found, _, lines = team(servers=2, wanted=lambda: wanted.pop() if wanted else None)
    until(lambda: bool(lines))
    assert lines == [
        "the number of table servers stays 2: 5 servers are too many for 2 ranges of rows: each "
        "server needs at least one range; resume the run with strategy.ranges: 5 or more"
    ]
    assert [*found.servers] == [0, 1]


class Offer(SimpleNamespace):
    """A host that offers a server, or has taken the offer back."""

    def refuse(self, reason: str) -> None:
        self.reason = reason


def test_a_server_on_another_host_takes_its_share_or_is_refused(team: Any) -> None:
    """A host that was stopped before its turn is passed over."""
    found, _, lines = team(servers=2, ranges=3)
    gone, third, fourth = (Offer(host=f"10.0.0.{at}", gone=at == 2) for at in (2, 3, 4))
    for one in gone, third, fourth:
        found.offer(one)
    until(lambda: "the ranges of rows have passed on" in lines[-1] if lines else False)
    assert lines[0] == "table server 2 joins the run on host 10.0.0.3"
    until(lambda: hasattr(fourth, "reason"))
    assert "4 servers are too many for 3 ranges of rows" in fourth.reason
    assert found.hosts == {0: None, 1: None, 2: "10.0.0.3"}
    assert [len(one) for one in found._seats.values()] == [1, 1, 1]
    assert [port for port, _ in found.leaders].count(102) == 1


def test_a_run_begins_with_the_servers_of_other_hosts(team: Any) -> None:
    offers = tuple(Offer(host=f"10.0.0.{at}", gone=at == 2) for at in (2, 3, 4))
    found, _, lines = team(offers=offers, servers=3, processes={"remote_servers": 2})
    assert lines == ["waiting for 2 table servers of other hosts"]
    assert found.hosts == {0: "10.0.0.3", 1: "10.0.0.4", 2: None}
    remote = {"remote_servers": 2, "deadline_seconds": 0.05}
    with pytest.raises(RunError, match="only 1 of 2 servers of other hosts have come within 0"):
        team(offers=offers[:2], servers=2, processes=remote)


def test_a_server_that_its_host_starts_again_takes_the_place_of_the_one_here(team: Any) -> None:
    """Even if each server has one range, so that no further server could join."""
    begun = tuple(Offer(host=f"10.0.0.{at}", gone=False) for at in (1, 2))
    settings = {"servers": 3, "replicas": 2, "processes": {"remote_servers": 2}}
    found, played, lines = team(offers=begun, **settings)
    played[1].die()
    until(lambda: 3 in played and found.safe)
    assert found.hosts[3] is None
    found.offer(Offer(host="10.0.0.2", gone=False))
    until(lambda: 4 in played and 3 not in found.servers and found.settled and found.safe)
    assert lines[-1] == "table 3 leaves: table 4 on host 10.0.0.2 takes its place"
    assert found.hosts[4] == "10.0.0.2"
    assert sorted(found.servers) == [0, 2, 4]
    last = Offer(host="10.0.0.3", gone=False)
    found.offer(last)  # No server is missing any more.
    until(lambda: hasattr(last, "reason"))


def test_a_server_that_dies_while_it_joins_is_replaced(team: Any) -> None:
    wanted = [3]
    found, played, lines = team(
        stuck=(2,), servers=2, ranges=6, wanted=lambda: wanted.pop() if wanted else None
    )
    until(lambda: 2 in played)
    played[2].die()
    until(lambda: 3 in played and "passed on" in lines[-1])
    until(lambda: all(port for port, _ in found.leaders))
    assert sorted(len(one) for one in found._seats.values()) == [2, 2, 2]
    assert found.failure is None


def test_a_server_at_a_fixed_port_does_not_leave(team: Any) -> None:
    found, played, lines = team(servers=1, processes={"port": 4000})
    played[0].hear(event="leaves")
    until(lambda: bool(lines))
    assert "table 0 was asked to leave but stays" in lines[0]
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


def test_a_session_that_is_closed_while_it_is_lost_is_not_opened_again() -> None:
    reopens, opened = threading.Event(), []

    class Lost(threading.Event):
        def clear(self) -> None:
            kept.close()  # The last moment: the thread has just seen that nobody closed it.
            super().clear()

    def refuse(*_: Any) -> Any:
        opened.append(reopens.wait(10))
        raise WireError("nobody listens")

    kept = KeptSession(SimpleNamespace(open=refuse), lambda _: None, lambda _: None)  # pyright: ignore[reportArgumentType]
    kept._lost = Lost()
    reopens.set()
    kept._keeper.join(10)
    assert not kept._keeper.is_alive()
    assert opened == [True]
