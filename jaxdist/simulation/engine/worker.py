"""A worker in a simulation, which reads from every server, computes, and pushes to every server."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from jaxdist.param_server.consistency.arrival import OnArrival
from jaxdist.param_server.protocol import client
from jaxdist.param_server.protocol.client import ClientState
from jaxdist.param_server.protocol.messages import Message, Push, Reply
from jaxdist.simulation.engine.client import RetryingClient
from jaxdist.simulation.engine.curve import joined_parameters
from jaxdist.simulation.engine.network import Node
from jaxdist.simulation.engine.problem import Computed
from jaxdist.simulation.engine.trainer import LocalTrainer

if TYPE_CHECKING:
    from jaxdist.simulation.engine.run import Simulation


class WorkerNode(RetryingClient):
    """A worker in virtual time.

    Attributes:
      client: the worker's number in the protocol, which changes after each crash.
      links: the protocol's state of the worker for each server, in order.
      busy_seconds: the time spent on gradients.
      idle_seconds: the time that the worker was alive and waited for servers or the network.
    """

    def __init__(self, number: int, step_seconds: float, run: Simulation) -> None:
        super().__init__(run)
        self.number, self.step_seconds = number, step_seconds
        self.busy_seconds = self.idle_seconds = 0.0
        self.gradients = self.crashes = 0
        # Each worker has a separate generator, so that other events do not change its draws.
        self._random = random.Random(f"worker {number} {run.config.seed}")
        self.begin(number)

    def begin(self, number: int) -> None:
        """Begin as a new client with this number. The client has to pull all parameters."""
        self.client, self.alive, self.busy, self.left = number, True, False, False
        servers = range(len(self.run.shards))
        self.links = [ClientState(number) for _ in servers]
        self.copies: list[np.ndarray | None] = [None for _ in servers]
        self.sent = {}
        workers = self.run.cluster.workers
        self.trainer = LocalTrainer(
            self.run.model, self.run.problem, self.run.rule, self.number, workers
        )
        self._read: list[int | None] = []
        self.encoders = self.run.encoders(number)
        self.waits_since = self.run.now

    @property
    def node(self) -> Node:
        return "worker", self.number

    @property
    def clock(self) -> int:
        return min(link.clock for link in self.links)

    @property
    def finished(self) -> bool:
        """Whether the worker has taken its steps, and knows that all its pushes are settled."""
        return self._done and not any(link.under_way for link in self.links)

    @property
    def _done(self) -> bool:
        return self.clock >= self.run.clocks if self.run.pool is None else self.run.pool < 1

    def go_on(self) -> None:
        """Compute if every copy is new enough; otherwise pull newer copies from their servers."""
        if not self.alive or self.busy or self.left:
            return
        if self._done:
            if self.finished:
                self.left = True
                self.run.remove(self, self.client)
            return
        if not self._pull_where(False) and not self._held_back():
            self._compute()

    def _pull_where(self, ready: bool) -> int:
        """Pull new parameters from the selected servers, and return the number of these servers.

        If `ready` is true, the selected servers are the servers from whose copies the worker may
        compute. If `ready` is false, all other servers are selected. No pull is sent to a server
        that has not answered the last pull.
        """
        found = [
            server
            for server, link in enumerate(self.links)
            if client.ready(self.run.worker_model, link) == ready
        ]
        for server in found:
            if not self.links[server].pulling and self.links[server].room:
                self.links[server], message = client.pull(self.links[server])
                self.ask(server, message, None)
        return len(found)

    def _compute(self) -> None:
        self.run.check_reads(self)
        if self.run.pool is not None:
            self.run.pool -= 1
        self.idle_seconds += self.run.now - self.waits_since
        self._read = [link.version for link in self.links]
        copy = joined_parameters(
            self.run.problem, self.run.shards, [one for one in self.copies if one is not None]
        )
        first = self.trainer.read(copy)
        clock, me = self.clock, self.client
        if first is not None:
            self._push(first)
        self.busy = True
        if self.run.worker_model.ahead:
            self._pull_where(True)
        factor = self.run.config.factor(self.number, self.run.now)
        seconds = self.step_seconds * self.trainer.local_steps * factor
        if self.run.config.noise:
            seconds *= self._random.lognormvariate(0.0, self.run.config.noise)
        self.run.after(seconds, lambda: self._computed(me, clock, seconds, first is not None))

    def _computed(self, me: int, clock: int, seconds: float, pushed: bool) -> None:
        if me != self.client or not self.alive:  # The worker crashed while it computed.
            return
        found = self.trainer.compute(clock)
        self.gradients += self.trainer.local_steps
        self.busy_seconds += seconds
        self.busy, self.waits_since = False, self.run.now
        if not pushed:
            self._push(found)
        self.go_on()

    def _push(self, change: Computed) -> None:
        counts, clock = change.tokens != 0, self.clock
        for server, shard in enumerate(self.run.shards):
            payload = shard.layout.flatten(change.gradient)
            # The gradient of a batch without tokens may be 0/0, and would make the encoder's
            # residual NaN.
            if not counts:
                payload, fine = np.zeros_like(payload), True
            elif self.encoders:
                sequence = self.links[server].sequence
                payload, fine = self.encoders[server].decoded(payload, sequence)
            else:
                fine = bool(np.isfinite(payload).all())
            link, message = client.push(
                self.links[server],
                clock=clock,
                version=self._read[server],
                tokens=change.tokens,
                usable=fine,
            )
            self.links[server] = link
            self.sent[server, message.stamp.sequence] = payload
            self.ask(server, message, payload)

    def hear(self, server: int, reply: Reply, payload: np.ndarray | None) -> None:
        """Receive a server's reply.

        Args:
          payload: the parameters in the reply, or None for a reply without parameters.
        """
        if reply.client != self.client or not self.alive:
            return
        heard = client.hear(self.links[server], reply)
        assert heard.refused is None, heard.refused
        self.links[server] = heard.state
        if heard.takes:
            self.copies[server] = payload
        if heard.settled is not None:
            del self.sent[server, heard.settled]
        self.go_on()

    def link(self, server: int) -> ClientState:
        """Return the worker's state as a client of a server."""
        return self.links[server]

    def ask(self, server: int, message: Message, payload: np.ndarray | None) -> None:
        """Send a message to a server or to the rack's aggregator, unless the worker has crashed."""
        if self.alive:
            self.run.ask(self, server, message, payload)

    def under_way(self, server: int) -> np.ndarray:
        """Return the sum of this worker's gradients that a server has not settled."""
        total = np.zeros_like(self.run.shards[server].arrays.params)
        for (where, sequence), payload in self.sent.items():
            if where == server and isinstance(self.links[server].under_way.get(sequence), Push):
                total = total + payload
        return total

    def _held_back(self) -> bool:
        model = self.run.model
        if not isinstance(model, OnArrival) or model.value_bound is None:
            return False
        workers = self.run.cluster.workers
        found = [self.run.values.of(self.under_way(at)) for at in range(len(self.links))]
        return model.holds_back(float(np.max(found)), workers)

    def crash(self) -> None:
        """Crash and lose all state; messages that were already sent are still delivered."""
        if not self.alive or self.left:
            return
        if not self.busy:
            self.idle_seconds += self.run.now - self.waits_since
        elif self.run.pool is not None:
            # The interrupted step returns to the pool, from which another worker takes it.
            self.run.pool += 1
        self.alive, self.busy = False, False
        self.crashes += 1
        me = self.client
        self.run.after(self.run.config.detect_seconds, lambda: self.run.remove(self, me))
