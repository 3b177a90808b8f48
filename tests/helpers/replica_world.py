"""Workers, replicated servers and an arbiter on a simulated network, all drawn from a seed.

The parameters of a server are the tuple of all pushes that it has applied, in order, so that a copy
of the parameters shows the server's whole history.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from jaxdist.param_server.consistency.contract import Clocks
from jaxdist.param_server.protocol import client as worker
from jaxdist.param_server.protocol import server as protocol
from jaxdist.param_server.protocol.messages import Acknowledge, Answer, Apply, Publish, Refuse
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.replication.decision import (
    Copied,
    Follower,
    Leader,
    LogEntry,
    RangeView,
)

ARBITER = "arbiter"


def begin_leader(view: RangeView, state: RangeState) -> Leader:
    """The first leader of a range; the follower begins with the same state and arrays."""
    has: dict[int, int | None] = {} if view.follower is None else {view.follower: 0}
    return Leader(view, state, has=has)


def begin_follower(server: int, state: RangeState, epoch: int = 0) -> Follower:
    """The first follower of a range."""
    return Follower(server, epoch, 0, state)


@dataclass
class Node:
    """A server with its role (leader or follower) and its parameters."""

    number: int
    role: Leader | Follower
    applied: tuple = ()
    payloads: dict = field(default_factory=dict)
    held: list = field(default_factory=list)
    changes: dict = field(default_factory=dict)


class World:
    """A simulation that runs until all workers have taken their steps or the range is lost."""

    def __init__(self, model, seed, workers=3, steps=4, faults=True):
        self.rng, self.model, self.steps = random.Random(seed), model, steps
        self.faults, self.now = faults, 0.0
        self.view = RangeView(0, 0, leader=0, follower=1)
        start = RangeState(Clocks(workers))
        for client in range(workers):
            start = protocol.join(model, start, client).state
        leader, follower = begin_leader(self.view, start), begin_follower(1, start)
        self.nodes = {0: Node(0, leader), 1: Node(1, follower)}
        self.next_node, self.next_client = 2, workers
        self.clients = {n: worker.ClientState(n) for n in range(workers)}
        self.views = dict.fromkeys(self.clients, self.view)
        self.copies, self.acknowledged, self.read = {}, [], {}
        self.network, self.cut, self.lost = [], set(), False
        self.takeovers, self.swaps, self.left = 0, 0, []

    # the network

    def send(self, source, target, message):
        if self.faults and self.rng.random() < 0.08:
            return
        copies = 2 if self.faults and self.rng.random() < 0.1 else 1
        self.network += [(source, target, message)] * copies

    def deliver(self):
        if not self.network:
            return
        source, target, message = self.network.pop(self.rng.randrange(len(self.network)))
        if frozenset((source, target)) in self.cut:
            return
        if target == ARBITER:
            self.decide(*message)
        elif isinstance(target, str):
            self.hear(int(target[1:]), source, message)
        elif target in self.nodes:
            self.serve(self.nodes[target], source, message)

    # the arbiter

    def decide(self, kind, server, number):
        found = getattr(self.view, kind)(server, number)
        if found is None:
            self.lost = server not in self.nodes  # a single leader that is alive is not replaced
            return
        self.takeovers += found.epoch > self.view.epoch
        changed, self.view = found is not self.view, found
        self.tell()
        if kind == "synced" and changed and self.faults and self.rng.random() < 0.3:
            self.nodes.pop(found.leader, None)  # immediately after the follower became one

    def tell(self):
        for node in self.nodes:
            self.send(ARBITER, node, self.view)
        for client in self.clients:
            self.send(ARBITER, f"c{client}", self.view)

    # servers

    def serve(self, node, source, message):
        role = node.role
        if isinstance(message, RangeView):
            self.viewed(node, message)
        elif isinstance(message, Copied):
            if isinstance(role, Leader):
                node.role = role.copied(message)
                self.release(node)
        elif isinstance(message[0], LogEntry):
            self.follow(node, source, *message)
        elif isinstance(role, Leader) and not role.deposed:
            client, epoch, thing = message
            if epoch == role.view.epoch:
                self.handle(node, client, thing)

    def handle(self, node, client, thing):
        """Process a worker's message: ("resume", sequence), "join", "leave", or a pull or push."""
        state = node.role.range
        match thing:
            case ("resume", sequence):
                step = protocol.resume(self.model, state, client, sequence, self.now)
            case "join" | "leave":
                known = client in state.inboxes
                if known == (thing == "join"):
                    return
                step = getattr(protocol, thing)(self.model, state, client, self.now)
            case (message, payload):
                node.payloads.setdefault((client, message.stamp.sequence), payload)
                step = protocol.receive(self.model, state, message, self.now)
        self.do(node, step)

    def do(self, node, step):
        before = node.role
        node.role, changes = before.stepped(step), []
        for effect in step.effects:
            if isinstance(effect, Apply):
                parts = [part.arrival for part in effect.merge.parts]
                change = tuple((one.client, node.payloads[one.client, one.sequence])
                               for one in parts)  # fmt: skip
                node.applied += ((effect.version, change),)
                changes.append((effect.version, change))
            elif isinstance(effect, Acknowledge | Answer | Publish | Refuse):
                node.held.append((node.role.index, effect, node.applied))
        if node.role.entries and node.role.entries[-1].index > before.index:
            node.changes[node.role.index] = changes
            self.copy(node, node.role.entries[-1:])
        self.release(node)

    def copy(self, node, entries):
        for other, at in node.role.has.items():
            if at is None:
                self.send(node.number, other, (node.role.snapshot(), node.applied))
            for entry in entries:
                self.send(node.number, other, (entry, tuple(node.changes[entry.index])))

    def release(self, node):
        safe = node.role.safe
        due = [one for one in node.held if one[0] <= safe]
        node.held = [one for one in node.held if one[0] > safe]
        for _, reply, applied in due:
            self.send(node.number, f"c{reply.client}", (node.role.view.epoch, reply, applied))
        if (joined := node.role.synced) is not None:
            self.send(node.number, ARBITER, ("synced", joined, node.role.view.number))

    def follow(self, node, source, entry, arrays):
        role = node.role
        if isinstance(role, Leader):
            self.send(node.number, source, Copied(role.view.epoch, node.number, role.index))
            return
        node.role, takes = role.follow(entry)
        if takes:
            node.applied = arrays if entry.whole else node.applied + arrays
        self.send(node.number, source, node.role.copied)

    def viewed(self, node, view):
        role = node.role
        if isinstance(role, Leader):
            node.role = role.viewed(view, node.number)
            self.release(node)
        elif view.leader == node.number and view.epoch > role.epoch:
            node.role = role.takes_over(view)

    # workers

    def hear(self, client, source, message):
        if client not in self.clients:
            return
        if isinstance(message, RangeView):
            if message.epoch > self.views[client].epoch:
                self.views[client] = message
                self.clients[client] = worker.client_in_epoch(self.clients[client], message.epoch)
                self.again(client)
            return
        epoch, reply, applied = message
        if epoch != self.clients[client].epoch:
            return
        before = self.clients[client]
        heard = worker.hear(before, reply)
        self.clients[client] = heard.state
        if heard.takes:
            assert applied[: len(self.copies.get(client, ()))] == self.copies.get(client, ())
            assert len(applied) == reply.version, "a copy is of the version that it names"
            self.copies[client] = applied
        if heard.settled is not None and reply.version is not None:
            self.acknowledged.append((client, before.under_way[heard.settled].clock))

    def say(self, client, thing):
        state = self.clients[client]
        self.send(f"c{client}", self.views[client].leader, (client, state.epoch, thing))

    def post(self, client, message):
        self.say(client, (message, getattr(message, "clock", None)))

    def again(self, client):
        state = self.clients[client]
        self.say(client, "join")
        self.say(client, ("resume", min(state.under_way, default=state.sequence)))
        for message in worker.retries(state):
            self.post(client, message)

    def act(self, client):
        state = self.clients[client]
        if state.clock < self.steps and worker.ready(self.model, state) and state.room:
            self.clients[client], message = worker.push(state)
            self.post(client, message)
        elif state.clock < self.steps and not state.pulling and state.room:
            self.clients[client], message = worker.pull(state)
            self.post(client, message)
        elif self.rng.random() < 0.3:
            self.again(client)

    # what goes wrong

    def timer(self, node):
        """Send entries again, and report servers as failed, sometimes although they are alive."""
        role = node.role
        if isinstance(role, Leader):
            if role.deposed:
                return
            self.copy(node, role.entries)
            self.release(node)
            others = [*role.has]
        else:
            others = [self.view.leader]
        chance = 0.02 if self.faults else 0.0
        for other in others:
            gone = other not in self.nodes
            if gone or self.rng.random() < chance:
                number = role.view.number if isinstance(role, Leader) else self.view.number
                self.send(node.number, ARBITER, ("failed", other, number))

    def fault(self):
        draw = self.rng.random()
        view, alive = self.view, self.nodes
        pair = [one for one in (view.leader, view.follower) if one is not None]
        if draw < 0.3:
            # Remove one of the two servers if both are alive, so that the other one can lead.
            if len(pair) == 2 and all(one in alive for one in pair):
                del self.nodes[self.rng.choice(pair)]
        elif draw < 0.36:
            self.swap()
        elif draw < 0.5:
            ends = self.rng.sample([*self.nodes, ARBITER, *(f"c{n}" for n in self.clients)], 2)
            self.cut.add(frozenset(ends))
        elif draw < 0.65:
            self.isolate()
        elif draw < 0.8:
            self.cut.clear()
        elif draw < 0.9 and len(self.clients) > 1:
            client = self.rng.choice([*self.clients])
            del self.clients[client]
            self.left.append(client)  # `run` sends the leader a message about it
        else:
            number, self.next_client = self.next_client, self.next_client + 1
            self.clients[number] = worker.ClientState(number, self.view.epoch)
            self.views[number] = self.view
            self.say(number, "join")

    def isolate(self):
        """Cut the leader and a worker off from the arbiter; the follower reports the leader."""
        leader, follower = self.view.leader, self.view.follower
        if follower in self.nodes and leader in self.nodes:
            client = self.rng.choice([*self.clients])
            self.cut |= {frozenset((ARBITER, leader)), frozenset((ARBITER, f"c{client}"))}
            self.send(follower, ARBITER, ("failed", leader, self.view.number))

    def swap(self):
        """Make the follower the leader, although nothing failed, and the leader a new follower."""
        leader, follower = self.view.leader, self.view.follower
        if follower in self.nodes and leader in self.nodes:
            self.decide("failed", leader, self.view.number)
            self.nodes[leader] = Node(leader, Follower(leader, self.view.epoch))
            self.view = self.view.joined_by(leader)
            self.swaps += 1
            self.tell()

    def join_server(self):
        if self.view.follower is not None or self.view.joining is not None:
            return
        number, self.next_node = self.next_node, self.next_node + 1
        self.nodes[number] = Node(number, Follower(number, self.view.epoch))
        self.view = self.view.joined_by(number)
        self.tell()

    @property
    def done(self):
        return all(one.clock >= self.steps and not one.under_way for one in self.clients.values())

    def run(self, events=20_000):
        for at in range(events):
            if self.done or self.lost:
                return self
            self.now += 1.0
            calm = at > 1500
            if calm and at == 1501:
                self.faults, self.cut = False, set()
            draw = self.rng.random()
            if draw < 0.6:
                self.deliver()
            elif draw < 0.85:
                self.act(self.rng.choice([*self.clients]))
            elif draw < 0.95:
                self.timer(self.nodes[self.rng.choice([*self.nodes])])
            elif draw < 0.97:
                self.join_server()
                self.tell()
                for client in self.left:
                    self.send(ARBITER, self.view.leader, (client, self.view.epoch, "leave"))
            elif self.faults and self.rng.random() < 0.3:
                self.fault()
        raise AssertionError(f"stuck: {self.view}, {[*self.nodes]}, {self.clients}")

    def check(self):
        """Check that the history of the last leader has each acknowledged push exactly once."""
        if self.lost or self.view.leader not in self.nodes:
            return
        final = self.nodes[self.view.leader].applied
        once = [push for _, change in final for push in change]
        assert len(once) == len({*once}), "a push was applied twice"
        missing = {*self.acknowledged} - {*once}
        assert not missing, f"acknowledged, and lost: {missing}"
        versions = [version for version, _ in final]
        assert versions == [*range(1, len(final) + 1)], "a version was passed over or came twice"
        for client, copy in self.copies.items():
            assert final[: len(copy)] == copy, f"client {client} read what was undone"
