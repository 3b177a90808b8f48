"""Workers and a range on a simulated network that loses, copies and reorders messages."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from jaxdist.param_server.consistency.arrays import combined
from jaxdist.param_server.consistency.contract import Clocks
from jaxdist.param_server.protocol import client as worker
from jaxdist.param_server.protocol import server
from jaxdist.param_server.protocol.messages import Acknowledge, Apply, Drop, Publish, Refuse
from jaxdist.param_server.protocol.server import RangeState


@dataclass
class Chaos:
    """The probabilities of the faults that the network applies to a message."""

    loses: float = 0.0
    copies: float = 0.0
    reorders: bool = False


@dataclass
class Team:
    """N workers that train w towards 0 with gradient(w, client, clock), and a server with SGD.

    All events are drawn from `rng`, and the time is the number of events.
    """

    model: object
    workers: int
    gradient: object
    steps: int = 6
    seed: int = 0
    chaos: Chaos = field(default_factory=Chaos)
    learning_rate: float = 0.1
    start: object = 1.0
    speeds: tuple[int, ...] | None = None
    tokens: object = lambda client, clock: 1.0

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        self.w = np.asarray(self.start, np.float64)
        self.state = RangeState(Clocks(self.workers))
        self.now = 0.0
        self.network, self.payloads, self.values = [], {}, {0: self.w}
        self.clients, self.copies = {}, {}
        self.applied, self.dropped, self.reads, self.log = [], [], [], []
        self.floors, self.refused = [0], []
        for number in range(self.workers):
            self.join(number)

    def join(self, number):
        self.clients[number] = worker.ClientState(number, self.state.epoch)
        self.log.append(("join", number, self.now))
        self.do(server.join(self.model, self.state, number, self.now))

    def leave(self, number):
        del self.clients[number]
        self.log.append(("leave", number, self.now))
        self.do(server.leave(self.model, self.state, number, self.now))

    def move(self):
        """Begin a new epoch of the range, and tell all clients about it without the network."""
        epoch = self.state.epoch + 1
        self.log.append(("moved", epoch, self.now))
        self.state = server.range_in_epoch(self.state, epoch)
        self.clients = {
            n: worker.client_in_epoch(state, epoch) for n, state in self.clients.items()
        }

    def do(self, step):
        """Carry out the effects of a step of the server."""
        self.state = step.state
        for effect in step.effects:
            if isinstance(effect, Apply):
                self.apply(effect)
            elif isinstance(effect, Drop):
                self.dropped.append((effect.client, effect.sequence, effect.reason))
            else:
                self.send(("reply", effect, self.w))
        self.floors.append(self.state.clocks.floor)

    def apply(self, effect):
        merge = effect.merge
        self.applied.append((effect.version, merge))
        if merge.parts:
            change = combined(merge, lambda one: self.payloads[one.client, one.sequence])
            if self.model.payload == "gradient":
                change = -self.learning_rate * merge.rate * change
            self.w = self.w + change
        self.values[effect.version] = self.w

    def send(self, thing):
        if self.rng.random() < self.chaos.loses:
            return
        self.network += [thing] * (2 if self.rng.random() < self.chaos.copies else 1)

    def deliver(self):
        if not self.network:
            return
        at = self.rng.randrange(len(self.network)) if self.chaos.reorders else 0
        kind, thing, w = self.network.pop(at)
        if kind == "message":
            self.log.append((kind, thing, self.now))
            self.do(server.receive(self.model, self.state, thing, self.now))
        elif thing.client in self.clients:
            self.hear(thing, w)

    def hear(self, reply, w):
        heard = worker.hear(self.clients[reply.client], reply)
        self.clients[reply.client] = heard.state
        if heard.takes:
            self.copies[reply.client] = w
        if isinstance(reply, Refuse):
            self.refused.append(reply.reason)
        assert isinstance(reply, Publish | Refuse | Acknowledge) or reply.clock >= 0

    def act(self, number):
        """Let a worker compute, pull, or send again the messages that were not answered."""
        state = self.clients[number]
        if state.clock >= self.steps:
            self.again(number)
            return
        if worker.ready(self.model, state) and state.room:
            self.compute(number, state)
        elif state.pulling or not state.room:
            self.again(number)
        else:
            self.clients[number], message = worker.pull(state)
            self.send(("message", message, None))

    def again(self, number):
        """Send unanswered messages again, with probability 0.1 so that the queue does not grow."""
        if self.rng.random() > 0.1:
            return
        for message in worker.retries(self.clients[number]):
            self.send(("message", message, None))

    def compute(self, number, state):
        w = self.copies[number]
        # The copy must equal the server's parameters at the version that the copy names.
        np.testing.assert_array_equal(w, self.values[state.version])
        self.reads.append((number, state.clock, state.version, state.floor))
        if self.model.ahead and not state.pulling and state.room:
            state, message = worker.pull(state)
            self.send(("message", message, None))
        change = self.gradient(w, number, state.clock)
        tokens = self.tokens(number, state.clock)
        if not tokens:  # the mean over no tokens is NaN
            change = change * np.nan
        self.clients[number], message = worker.push(state, tokens=tokens)
        self.payloads[number, message.stamp.sequence] = change
        self.send(("message", message, None))

    def tick(self):
        self.now += 1.0
        when = server.wake(self.model, self.state)
        if when is not None and self.now >= when:
            self.log.append(("tick", None, self.now))
            self.do(server.tick(self.model, self.state, self.now))

    @property
    def done(self):
        return all(
            state.clock >= self.steps and not state.under_way for state in self.clients.values()
        )

    def run(self, limit=100_000):
        for _ in range(limit):
            if self.done:
                return self
            self.tick()
            if self.network and self.rng.random() < 0.7:
                self.deliver()
            else:
                (number,) = self.rng.choices(list(self.clients), self.weights())
                self.act(number)
        raise AssertionError(f"stuck: {self.state}")

    def weights(self):
        if self.speeds is None:
            return None
        return [self.speeds[number % self.workers] for number in self.clients]


def replayed(team):
    """Return the parameters of a server that processes the log of another server."""
    twin = Team(team.model, 0, team.gradient, start=team.start, learning_rate=team.learning_rate)
    twin.state, twin.payloads = RangeState(Clocks(team.workers)), team.payloads
    for kind, thing, now in team.log:
        if kind == "message":
            twin.do(server.receive(twin.model, twin.state, thing, now))
        elif kind == "moved":
            twin.state = server.range_in_epoch(twin.state, thing)
        elif kind == "tick":
            twin.do(server.tick(twin.model, twin.state, now))
        else:
            twin.do(getattr(server, kind)(twin.model, twin.state, thing, now))
    return twin
