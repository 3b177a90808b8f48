"""The table servers of a run, as process 0 sees them: the leaders of rows, and takeovers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from jaxdist.errors import RunError
from jaxdist.param_server.training.children import RunProcess
from jaxdist.replication.seat import Arbiter
from jaxdist.runtime.children import Event, end_together, how_ended
from jaxdist.train.strategy.config import Hybrid
from jaxdist.types import JsonObject

ASK_SECONDS = 0.5
"""The largest number of seconds without a message after which a server is asked whether it is
alive."""

Moved = Callable[[int, int, int], None]
"""A function that receives the range, the port and the epoch of a server that begins to lead."""


class TableTeam:
    """The table servers that process 0 has started, watches, and replaces if they die.

    Each range of rows has a leader and, with two replicas, a follower on another server. A server
    that replaces another gets a number that no server has had. A server that is asked to leave
    first hands its rows to a server that has all of them.

    Args:
      begin: a function that starts the process of a server, given its number, the range that it
        leads or None, and the queue of its events.
      note: a function that prints a line about what happened.
    """

    def __init__(
        self,
        strategy: Hybrid,
        begin: Callable[[int, int | None, SimpleQueue[Event]], RunProcess],
        note: Callable[[str], None],
    ) -> None:
        self._strategy, self._begin, self._note = strategy, begin, note
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._changed = threading.Condition(threading.RLock())
        self.servers: dict[int, RunProcess] = {}
        self._seats: dict[int, set[int]] = {}
        self._leaving: set[int] = set()
        self._left: list[RunProcess] = []
        self._heard: dict[int, float] = {}
        self._questions: dict[int, float] = {}
        self._pause = min(ASK_SECONDS, strategy.takeover_seconds / 4)
        self._next = self._deaths = 0
        self._closed = False
        self._asked: dict[int, JsonObject] = {}
        self._answers: dict[int, JsonObject] = {}
        self._arbiters = [Arbiter(at, at, self._tell) for at in range(strategy.servers)]
        self.failure: str | None = None
        self._failed: Callable[[str], None] = lambda reason: None
        self._moved: Moved = lambda server, port, epoch: None

    @property
    def leaders(self) -> list[tuple[int, int]]:
        """The port and the epoch of each range's leader; port 0 while a server takes over."""
        with self._changed:
            found = [(one.port or 0, one.view) for one in self._arbiters]
            return [(port, view.epoch if view else 0) for port, view in found]

    @property
    def safe(self) -> bool:
        """Whether each range has a leader that answers and a follower that has everything."""
        with self._changed:
            return all(one.safe for one in self._arbiters)

    def start(self) -> None:
        """Start all servers, and wait until each range has a leader and its followers.

        Raises:
          RunError: a server failed or died.
        """
        with self._changed:
            for at in range(self._strategy.servers):
                self._started(leads=at)
            threading.Thread(target=self._listen, name="tables", daemon=True).start()
            self._wait(lambda: all(one.port is not None for one in self._arbiters))
            self._fill()
            if self._strategy.replicas > 1:
                self._wait(lambda: all(one.safe for one in self._arbiters))

    def follow(self, failed: Callable[[str], None], moved: Moved) -> None:
        """Call `failed` when the servers fail, and `moved` for each current and later leader."""
        with self._changed:
            self._failed, self._moved = failed, moved
            if self.failure is not None:
                failed(self.failure)
            for one in self._arbiters:
                if one.port is not None and one.view is not None:
                    moved(one.range, one.port, one.view.epoch)

    def ask(self, what: JsonObject) -> list[JsonObject]:
        """Send an order to the leader of each range, and return the answers by range, in order.

        If a leader dies before its answer, the next leader of the range gets the order.

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
        """End all servers."""
        with self._changed:
            self._closed = True
            ended, self.servers = [*self.servers.values()], {}
        end_together([*ended, *self._left])

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self.failure is not None or condition())
        if self.failure is not None:
            raise RunError(self.failure)

    def _started(self, leads: int | None = None) -> int:
        number, self._next = self._next, self._next + 1
        self.servers[number] = self._begin(number, leads, self._events)
        self._seats[number] = set() if leads is None else {leads}
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
                self._changed.notify_all()

    def _ask_alive(self) -> None:
        """Kill servers that have not answered for too long, and ask all others for an answer."""
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
        """Start another server, which takes the rows of a server that was asked to leave."""
        if self._strategy.processes.port:
            self._note(
                f"{child} was asked to leave and stays, because the server that would replace it "
                "needs another port: set strategy.processes.port: 0"
            )
        elif child.number not in self._leaving:
            self._leaving.add(child.number)
            new = self.servers[self._started()]
            self._note(f"{child} leaves: {new} takes its place")
            self._fill()

    def _hand_over(self) -> None:
        """End the part of leaving servers in each range that another server can lead."""
        if self._asked:
            return  # A leader carries out an order to its end.
        for number in sorted(self._leaving):
            for at in sorted(self._seats[number]):
                arbiter = self._arbiters[at]
                view = arbiter.view
                leads = view is not None and view.leader == number
                if view is not None and (not leads or (arbiter.port and view.follower is not None)):
                    arbiter.failed(number)
                    self._seats[number].discard(at)
                    self._fill()
            if not self._seats[number]:
                self._leaving.discard(number)
                del self._seats[number], self._heard[number]
                self._left.append(self.servers.pop(number))
                self._left[-1].close_input()

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
        """Let followers take over, and start another server."""
        number, how = child.number, how_ended(code)
        del self.servers[number], self._heard[number]
        self._questions.pop(number, None)
        seats = self._seats.pop(number)
        self._leaving.discard(number)
        for at in seats:
            self._arbiters[at].failed(number)
        if any(one.view is None for one in self._arbiters):
            self._fail(
                f"{child} ended ({how}) and the rows that the server held are lost; use --resume "
                f"to continue from the newest checkpoint. {child.last_words()}".strip()
            )
            return
        self._deaths += 1
        again = self._deaths <= self._strategy.processes.deaths
        then = "another server is started" if again else "no other server is started"
        self._note(f"{child} ended ({how}): its follower servers take over, and {then}")
        if again:
            self._started()
        self._fill()

    def _fill(self) -> None:
        """Give each range the servers that it lacks, beginning with those that have few seats."""
        for arbiter in self._arbiters:
            view, at = arbiter.view, arbiter.range
            staying = self._seats.keys() - self._leaving
            seated = [one for one in staying if at in self._seats[one]]
            # The next server comes first, so that the followers of a server's ranges are spread.
            free = sorted(
                staying - {*seated},
                key=lambda one: (len(self._seats[one]), (one - at) % len(self._arbiters)),
            )
            if view is not None and len(seated) < self._strategy.replicas and free:
                self._seats[free[0]].add(at)
                self._tell(free[0], {"follow": at})
