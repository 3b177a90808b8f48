"""The supervision of a run's table servers by process 0, which replaces servers that die."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue

from jaxdist.errors import RunError
from jaxdist.replication.balance import passed
from jaxdist.replication.seat import Arbiter
from jaxdist.runtime.children import Event, end_together, how_ended
from jaxdist.tables.training.request import servers_problem
from jaxdist.train.strategy.config import Hybrid
from jaxdist.types import JsonObject
from jaxdist.wire.children import RunProcess
from jaxdist.wire.gate import RemoteProcess, too_few
from jaxdist.wire.ports import Place

ASK_SECONDS = 0.5
"""The number of seconds without a message after which a server is asked whether it is alive."""

Moved = Callable[[int, Place, int], None]
"""A function that is called when a server begins to lead a range. Its arguments are the number of
the range, the address of the server (`jaxdist.wire.ports.Place`), and the epoch."""
BeginsServer = Callable[[int, list[int], SimpleQueue[Event], RemoteProcess | None], RunProcess]
"""A function that starts a table server, given its number, the ranges that it leads, the queue of
its events, and the process on another host that runs the server, or None to run the server on this
host."""


class TableTeam:
    """The table servers that process 0 has started, watches, and replaces if they die.

    Hashes divide the rows into ranges. Each range has a leader, which is the server that answers
    the workers, and, with two replicas, a follower on another server. A server that starts later
    gets a number that no server has had.

    A server gives up a range only when other servers have all rows of this range. A server that is
    asked to leave gives up all of its ranges, and ends afterwards. If a server joins, some of the
    other servers give up ranges, which pass to the new server.

    Args:
      begin: a function that starts the process of a server.
      note: a function that prints a line about what happened.
      wanted: a function that returns a new number of servers, or None if the number stays.
    """

    def __init__(
        self,
        strategy: Hybrid,
        begin: BeginsServer,
        note: Callable[[str], None],
        wanted: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._strategy, self._begin, self._note = strategy, begin, note
        self._wanted, self._next_look = wanted, 0.0
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._changed = threading.Condition(threading.RLock())
        self.servers: dict[int, RunProcess] = {}
        self._seats: dict[int, set[int]] = {}
        self._offers: deque[RemoteProcess] = deque()
        self._leaving: set[int] = set()
        self._elsewhere: set[int] = set()
        self._passing: set[tuple[int, int]] = set()
        self._swaps: set[int] = set()
        self._left: list[RunProcess] = []
        self._heard: dict[int, float] = {}
        self._questions: dict[int, float] = {}
        self._pause = min(ASK_SECONDS, strategy.takeover_seconds / 4)
        self._next = self._deaths = 0
        self._count = strategy.servers
        self._opened = self._resizing = self._closed = False
        self._asked: dict[int, JsonObject] = {}
        self._answers: dict[int, JsonObject] = {}
        ranges = range(strategy.range_count)
        self._arbiters = [Arbiter(at, at % strategy.servers, self._tell) for at in ranges]
        self.failure: str | None = None
        self._failed: Callable[[str], None] = lambda reason: None
        self._moved: Moved = lambda server, port, epoch: None

    @property
    def leaders(self) -> list[tuple[Place, int]]:
        """The address (`Place`), or 0 during a takeover, and the epoch of each range's leader."""
        with self._changed:
            found = [(one.port or 0, one.view) for one in self._arbiters]
            return [(port, view.epoch if view else 0) for port, view in found]

    @property
    def safe(self) -> bool:
        """Whether each range has a leader that answers and a follower that has all of its rows."""
        with self._changed:
            return all(one.safe for one in self._arbiters)

    @property
    def settled(self) -> bool:
        """Whether each range has a leader, and no range is moving to another server."""
        with self._changed:
            moving = self._passing or self._leaving or self._swaps
            return not moving and all(one.port is not None for one in self._arbiters)

    def start(self) -> None:
        """Start all servers, and wait until each range has a leader and its followers.

        Raises:
          RunError: a server failed or died, or too few servers of other hosts have come.
        """
        with self._changed:
            remotes = self._await_offers(self._strategy.processes.remote_servers)
            for at in range(self._count):
                leads = range(at, len(self._arbiters), self._count)
                self._started(leads, remotes[at] if at < len(remotes) else None)
            threading.Thread(target=self._listen, name="tables", daemon=True).start()
            self._wait(lambda: all(one.port is not None for one in self._arbiters))
            self._fill()
            if self._strategy.replicas > 1:
                self._wait(lambda: all(one.safe for one in self._arbiters))
            self._opened = True

    def follow(self, failed: Callable[[str], None], moved: Moved) -> None:
        """Call `moved` for each current leader now, and for each new leader later.

        `failed` is called if the servers have failed already, or as soon as they fail.
        """
        with self._changed:
            self._failed, self._moved = failed, moved
            if self.failure is not None:
                failed(self.failure)
            for one in self._arbiters:
                if one.port is not None and one.view is not None:
                    moved(one.range, one.port, one.view.epoch)

    def offer(self, remote: RemoteProcess) -> None:
        """Queue the process `remote`, which another host offers as a server.

        The team later adds the server, as soon as the run is ready for it, or refuses the offer.
        """
        with self._changed:
            self._offers.append(remote)
            self._changed.notify_all()

    def ask(self, what: JsonObject) -> list[JsonObject]:
        """Send an order to the leader of each range, and return the answers by range, in order.

        If a leader dies before its answer, the next leader of the range gets the order.

        Args:
          what: the order, to which the number of the range is added.

        Raises:
          RunError: a server failed, or a range has no server any more.
        """
        with self._changed:
            self._answers = {}
            self._asked = {one.range: {**what, "range": one.range} for one in self._arbiters}
            for at in self._asked:
                self._order(at)
            self._wait(lambda: not self._asked)
            return [self._answers[at] for at in sorted(self._answers)]

    def close(self) -> None:
        """End all table servers of the run."""
        with self._changed:
            self._closed = True
            ended, self.servers = [*self.servers.values()], {}
        end_together([*ended, *self._left])

    def _await_offers(self, count: int) -> list[RemoteProcess]:
        seconds = self._strategy.processes.deadline_seconds
        if count:
            self._note(f"waiting for {count} table servers of other hosts")

        def enough() -> bool:
            self._offers = deque(one for one in self._offers if not one.gone)
            return len(self._offers) >= count

        if not self._changed.wait_for(enough, seconds):
            raise RunError(too_few(len(self._offers), count, "servers", seconds))
        return [self._offers.popleft() for _ in range(count)]

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self.failure is not None or condition())
        if self.failure is not None:
            raise RunError(self.failure)

    def _started(self, leads: Iterable[int] = (), remote: RemoteProcess | None = None) -> int:
        number, self._next = self._next, self._next + 1
        self._seats[number] = {*leads}
        if remote is not None:
            self._elsewhere.add(number)
        leads = sorted(self._seats[number])
        self.servers[number] = self._begin(number, leads, self._events, remote)
        self._heard[number] = time.monotonic()
        return number

    def _tell(self, server: int, order: JsonObject) -> None:
        if server in self.servers:
            self.servers[server].say(order)

    def _order(self, at: int) -> None:
        """Send the leader of a range its order, or do nothing until the range has a leader."""
        arbiter = self._arbiters[at]
        if at in self._asked and arbiter.port is not None and arbiter.view is not None:
            self._tell(arbiter.view.leader, self._asked[at])

    def _listen(self) -> None:
        """Process the messages of the servers until `close` is called."""
        while True:
            try:
                event = self._events.get(timeout=self._pause)
            except Empty:
                event = None
            with self._changed:
                if self._closed:
                    return
                if event is not None:
                    self._hear(event)
                if self._strategy.replicas > 1:
                    self._ask_alive()
                self._look()
                self._changed.notify_all()

    def _ask_alive(self) -> None:
        """Ask silent servers to answer, and kill servers that do not answer for too long."""
        now, patience = time.monotonic(), self._strategy.takeover_seconds
        for number, child in self.servers.items():
            begun = self._questions.get(number)
            if begun is None and now - self._heard[number] >= self._pause:
                self._questions[number] = now
                child.say({"alive": True})
            elif begun is not None and now - begun > patience:
                self._note(f"{child} has not answered for {patience:g} s, and is killed")
                child.process.kill()
                self._questions[number] = now

    def _hear(self, event: Event) -> None:
        number = event.child.number
        if self.servers.get(number) is not event.child:
            return
        if event.code is not None:
            self._died(event.child, event.code)
            return
        self._heard[number] = time.monotonic()
        self._questions.pop(number, None)
        what = event.what
        match what["event"]:
            case "failed":
                self._fail(f"{event.child}: {what['error']}")
            case "leaves":
                self._leaves(event.child)
            case "leads" | "copies" | "synced":
                self._seated(what)
            case "done" if what["range"] in self._asked:
                del self._asked[what["range"]]
                self._answers[what["range"]] = what
        self._hand_over()

    def _leaves(self, child: RunProcess) -> None:
        """Start another server in place of a server that was asked to leave.

        A server at a fixed port stays, because its replacement would need another port. If the
        server is already leaving, nothing is done.
        """
        if self._strategy.processes.port:
            self._note(
                f"{child} was asked to leave but stays, because its replacement would need "
                "another port: set strategy.processes.port: 0"
            )
        elif child.number not in self._leaving:
            self._replace(child.number)

    def _replace(self, number: int, remote: RemoteProcess | None = None) -> None:
        """Start another server, which takes over the rows of server `number`.

        Args:
          number: the number of the server to replace.
          remote: the process on another host that becomes the new server, or None for this host.
        """
        self._leaving.add(number)
        new = self.servers[self._started(remote=remote)]
        where = "" if remote is None else f" on host {remote.host}"
        self._note(f"{self.servers[number]} leaves: {new}{where} takes its place")
        self._fill()

    def _look(self) -> None:
        """Take the offers of other hosts, and begin a requested change of the number of servers."""
        if not self._opened or self._asked or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self._pause
        if self.failure is not None:
            return
        while self._offers:
            self._take_offer(self._offers.popleft())
        count = self._wanted()
        if count is None:
            return
        problem = servers_problem(self._strategy, count)
        if problem is None:
            self._resize(count)
        else:
            self._note(f"the number of table servers stays {self._count}: {problem}")

    def _take_offer(self, remote: RemoteProcess) -> None:
        count = len(self.servers.keys() - self._leaving) + 1
        problem = servers_problem(self._strategy, count)
        if remote.gone:
            return  # The offering command on the other host has been stopped.
        stand_in = self._stand_in()
        if stand_in is not None:
            self._replace(stand_in, remote)
            return
        if problem is not None:
            remote.refuse(problem)
            return
        self._note(f"table server {self._next} joins the run on host {remote.host}")
        self._resize(count, remote)

    def _stand_in(self) -> int | None:
        """Return a server of this host that was started for a lost server of another host.

        The result is None if no such server runs.
        """
        here = sorted(self.servers.keys() - self._leaving - self._elsewhere)
        planned = max(0, self._count - self._strategy.processes.remote_servers)
        return here[-1] if len(here) > planned else None

    def _resize(self, count: int, remote: RemoteProcess | None = None) -> None:
        """Change the number of servers to `count`.

        New servers take over some of the ranges. Surplus servers leave without a replacement.

        Args:
          remote: the process of the single new server if another host runs this server, or None.
        """
        staying = sorted(self.servers.keys() - self._leaving)
        self._note(f"the number of table servers changes from {len(staying)} to {count}")
        self._count, self._resizing = count, True
        more = count - len(staying)
        if more > 0:
            leads, follows = self._kept_by_role(staying)
            pairs = passed(leads, more)
            if self._strategy.replicas > 1:
                self._swaps |= {at for _, at in pairs}
                pairs += passed(follows, more, without=self._swaps)
            self._passing |= {*pairs}
            for _ in range(more):
                self._started(remote=remote)
        self._leaving |= {*staying[count:]}
        self._fill()
        self._hand_over()

    def _kept_by_role(self, staying: list[int]) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
        """Return the ranges that each staying server leads, and the ranges that it follows.

        Ranges that the server gives up are left out.
        """
        kept = {one: {at for at in self._seats[one] if self._keeps(one, at)} for one in staying}
        views = [one.view for one in self._arbiters]
        leads = {
            one: {at for at in kept[one] if (view := views[at]) and view.leader == one}
            for one in staying
        }
        return leads, {one: kept[one] - leads[one] for one in staying}

    def _keeps(self, server: int, at: int) -> bool:
        return server not in self._leaving and (server, at) not in self._passing

    def _hand_over(self) -> None:
        """Remove each server from the ranges that it gives up, once other servers have the rows.

        A server that leaves the run and has no more ranges is ended.
        """
        if self._asked:
            return  # Servers keep their ranges until all leaders have answered.
        for number in sorted(self._seats):
            for at in sorted(self._seats[number]):
                if not self._keeps(number, at) and self._is_replaced(number, at):
                    self._arbiters[at].failed(number)
                    self._seats[number].discard(at)
                    self._passing.discard((number, at))
                    self._tell(number, {"drop": at})
                    self._fill()
            if number in self._leaving and not self._seats[number]:
                self._leaving.discard(number)
                del self._seats[number], self._heard[number]
                self._left.append(self.servers.pop(number))
                self._left[-1].close_input()
        self._swap()
        if self._resizing and not (self._passing or self._leaving or self._swaps):
            self._resizing = False
            each = ", ".join(f"{len(self._seats[one])} on table {one}" for one in self.servers)
            self._note(f"the ranges of rows have passed on to their new servers: {each}")

    def _is_replaced(self, number: int, at: int) -> bool:
        """Return whether a server that gives up a range is no longer needed for the range.

        Args:
          number: the number of the server.
          at: the number of the range.
        """
        arbiter = self._arbiters[at]
        view = arbiter.view
        if view is None:
            return False
        heirs = [one for one in self._seats if at in self._seats[one] and self._keeps(one, at)]
        if view.leader == number and not (arbiter.port and view.follower is not None):
            return False
        return all(arbiter.knows(one) for one in heirs)

    def _swap(self) -> None:
        """In each range that has passed to its new server, make this server the leader.

        The earlier leader becomes the follower of the range.
        """
        for at in sorted(self._swaps):
            arbiter = self._arbiters[at]
            view = arbiter.view
            if view is not None and arbiter.safe and not any(one == at for _, one in self._passing):
                self._swaps.discard(at)
                arbiter.failed(view.leader)
                self._tell(view.leader, {"follow": at})

    def _seated(self, what: JsonObject) -> None:
        at = what["range"]
        arbiter = self._arbiters[at]
        arbiter.hear(what)
        if what["event"] == "synced":
            self._deaths = 0
        if what["event"] == "leads" and arbiter.port == what["port"]:
            self._moved(at, what["port"], what["epoch"])
            self._order(at)

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._failed(reason)

    def _died(self, child: RunProcess, code: int) -> None:
        """Let followers take over the ranges of a server that has ended.

        Another server is started if too few servers remain and the number of deaths is within the
        limit of the config. If rows are lost, the team fails.
        """
        number, how = child.number, how_ended(code)
        del self.servers[number], self._heard[number]
        self._questions.pop(number, None)
        seats = self._seats.pop(number)
        self._leaving.discard(number)
        self._passing -= {(number, at) for at in seats}
        for at in seats:
            self._arbiters[at].failed(number)
        if any(one.view is None for one in self._arbiters):
            self._fail(
                f"{child} ended ({how}) and the rows that the server held are lost; use --resume "
                f"to continue from the newest checkpoint. {child.last_words()}".strip()
            )
            return
        self._deaths += 1
        few = len(self.servers.keys() - self._leaving) < self._count
        again = few and self._deaths <= self._strategy.processes.deaths
        then = "another server is started" if again else "no other server is started"
        self._note(f"{child} ended ({how}): its follower servers take over, and {then}")
        if again:
            self._started()
        self._fill()

    def _fill(self) -> None:
        """Assign a follower to each range that lacks one; servers with few ranges come first."""
        for arbiter in self._arbiters:
            view, at = arbiter.view, arbiter.range
            staying = [one for one in self._seats if self._keeps(one, at)]
            seated = [one for one in staying if at in self._seats[one]]
            # Among servers with equally few ranges, the first is chosen in cyclic order from the
            # number of the range, so that the ranges of one leader have different followers.
            free = sorted(
                {*staying} - {*seated},
                key=lambda one: (len(self._seats[one]), (one - at) % len(self._arbiters)),
            )
            if view is not None and len(seated) < self._strategy.replicas and free:
                self._seats[free[0]].add(at)
                self._tell(free[0], {"follow": at})
