"""A simulation of servers, workers and network in virtual time; a seed fixes all bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from jaxdist.errors import ConfigError
from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.live.codes import Codes, PushEncoder
from jaxdist.param_server.live.layout import layouts
from jaxdist.param_server.protocol import server as protocol
from jaxdist.param_server.protocol.messages import Message, Reply
from jaxdist.param_server.protocol.rack import WITHIN
from jaxdist.simulation.engine.checks import Reads, Values
from jaxdist.simulation.engine.curve import LossCurve, joined_parameters
from jaxdist.simulation.engine.network import Action, EventQueue, Network, Node
from jaxdist.simulation.engine.problem import TrainingProblem, UpdateRule
from jaxdist.simulation.engine.rack import RackNode
from jaxdist.simulation.engine.report import Report, WorkerReport
from jaxdist.simulation.engine.setup import place_arrays, server_rule
from jaxdist.simulation.engine.shard import ShardNode, SimulatedShard
from jaxdist.simulation.engine.worker import WorkerNode


def simulate_training(
    cluster: Cluster,
    problem: TrainingProblem,
    rule: UpdateRule,
    *,
    clocks: int,
    measure_every: int = 10,
    step_seconds: Sequence[float] | None = None,
    pooled: bool = False,
    whole: frozenset[str] = frozenset(),
) -> Report:
    """Train with a parameter server in virtual time, and return a report.

    Args:
      rule: the update rule. If workers push gradients, the servers use the rule. If workers push
        the changes of local steps, the workers use the rule; in a decoupled model, the servers then
        use the outer optimizer of the model's settings.
      clocks: the number of pushes of each worker; with `pooled`, the mean number.
      measure_every: the number of steps between two measurements of the loss; a step has as many
        gradients as there are workers.
      step_seconds: the seconds that each worker needs for the gradient of its share of the batch;
        None takes the times of the section `simulation` of the cluster.
      pooled: whether all workers take pushes from a common pool, so that fast workers take more.
      whole: the names of parameters that the cluster's codec does not encode.

    Raises:
      ConfigError: settings of the cluster contradict each other, or pushes are masked.
    """
    cluster.check_cluster(learning_rate=rule.learning_rate)
    if cluster.secure:
        raise ConfigError(
            "strategy.aggregation.type secure is not simulated: set direct, whose rounds have the "
            "same numbers up to rounding",
            setting=("aggregation", "type"),
        )
    speeds = step_seconds or cluster.simulation.speeds(cluster.workers)
    pool = clocks * cluster.workers if pooled else None
    given = (cluster, problem, rule, speeds, clocks, measure_every, pool, whole)
    return Simulation(*given).run()


class Simulation:
    """A single simulated run; `simulate_training` describes the arguments."""

    def __init__(
        self,
        cluster: Cluster,
        problem: TrainingProblem,
        rule: UpdateRule,
        speeds: Sequence[float],
        clocks: int,
        measure_every: int,
        pool: int | None,
        whole: frozenset[str],
    ) -> None:
        self.cluster, self.config, self.model = cluster, cluster.simulation, cluster.consistency
        self.problem, self.rule, self.clocks = problem, rule, clocks
        self.pool = pool
        # The workers of a rack run in lockstep, for any consistency model of the racks.
        self.worker_model = WITHIN if cluster.clients < cluster.workers else self.model
        self.timeline = EventQueue()
        self.network = Network(self.config.link, self.timeline, self.config.seed)
        placement = place_arrays(problem.start, cluster, divisible=rule.divisible)
        outer = server_rule(self.model, rule)
        self.shards = [
            ShardNode(
                SimulatedShard(layout, self.model, outer, layout.flatten(problem.start)),
                cluster.clients,
                self.say,
            )
            for layout in layouts(placement, problem.start)
        ]
        held = [shard.layout for shard in self.shards]
        self.codes: list[Codes] = []
        if cluster.codec is not None:
            given = cluster.codec, cluster.feedback, whole, cluster.simulation.seed
            self.codes = [Codes(layout, *given) for layout in held]
        self._push_bytes = [one.spec.size_bytes for one in self.codes or held]
        self.workers = [WorkerNode(at, seconds, self) for at, seconds in enumerate(speeds)]
        self._clients = {worker.client: worker for worker in self.workers}
        places = enumerate(cluster.aggregation.racks(range(cluster.workers)))
        self.racks = [RackNode(at, workers, self) for at, workers in places]
        self._rack_clients: dict[int, RackNode] = {}
        self.reads = Reads(cluster, self.shards)
        self.values = Values(cluster, rule.learning_rate)
        self.curve = LossCurve(cluster, problem, self.shards, measure_every, self._gradients)

    @property
    def now(self) -> float:
        return self.timeline.now

    def after(self, seconds: float, action: Action) -> None:
        self.timeline.after(seconds, action)

    def run(self) -> Report:
        """Run until all workers have taken their steps or the time is over; return a report."""
        for worker in self.workers:
            self._join(worker)
        for crash in self.config.crashes:
            self.after(crash.at_seconds, self.workers[crash.worker].crash)
            if crash.back_seconds is not None:
                self.after(crash.back_seconds, partial(self._back, crash.worker))
        self.curve.measure(self.now)
        for worker in self.workers:
            self.after(0.0, worker.go_on)
        limit = float("inf") if self.config.seconds is None else self.config.seconds
        while self.timeline.step(limit):
            if all(worker.left for worker in self.workers):
                break
        else:
            self._check_not_stuck(limit)
        self.curve.measure(self.now)
        return self._report()

    def _check_not_stuck(self, limit: float) -> None:
        stuck = [one.number for one in self.workers if one.alive and not one.left]
        late = {client for shard in self.shards for client in shard.state.late}
        assert not stuck or limit < float("inf"), (
            f"deadlock: workers {stuck} wait forever for clients {late}"
        )

    def _join(self, worker: WorkerNode) -> None:
        place = self._rack_of(worker.number)
        if place is not None:
            place.join(worker.client)
            return
        for shard in self.shards:
            shard.join(worker.client, self.now)

    def remove(self, worker: WorkerNode, client: int) -> None:
        """Remove a worker permanently, so that no other worker waits for its client number."""
        place = self._rack_of(worker.number)
        if place is not None:
            place.leave(client)
            return
        for shard in self.shards:
            shard.leave(client, self.now)

    def _rack_of(self, worker: int) -> RackNode | None:
        return next((rack for rack in self.racks if worker in rack.workers), None)

    def begin_rack(self, rack: RackNode) -> int:
        """Let a rack join the servers; return the rack's number as a client."""
        number = len(self._rack_clients)
        self._rack_clients[number] = rack
        for shard in self.shards:
            shard.join(number, self.now)
        return number

    def end_rack(self, rack: RackNode) -> None:
        """Let a rack without workers leave the servers."""
        for shard in self.shards:
            shard.leave(rack.client, self.now)

    def _back(self, number: int) -> None:
        worker = self.workers[number]
        if worker.alive:
            return
        # Because of the new number, messages and replies from before the crash count as outdated.
        worker.begin(max(self._clients) + 1)
        self._clients[worker.client] = worker
        self._join(worker)
        worker.go_on()

    def ask(
        self, worker: WorkerNode, server: int, message: Message, payload: np.ndarray | None
    ) -> None:
        """Send a worker's message to a server, or to the aggregator of the worker's rack.

        Args:
          payload: the payload of a push, or None for any other message.
        """
        self._watch_values()
        place = self._rack_of(worker.number)
        if place is None:
            self.ask_server(worker.node, server, message, payload, worker.again)
            return
        self.network.send(
            worker.node,
            place.node,
            0 if payload is None else self._push_bytes[server],
            lambda: place.from_worker(server, message, payload),
            self._retry(lambda: worker.again(server, message)),
        )

    def ask_server(
        self,
        source: Node,
        server: int,
        message: Message,
        payload: np.ndarray | None,
        again: Callable[[int, Message], None],
    ) -> None:
        """Send a client's message to a server.

        If the message is lost, or arrives while the server is paused, `again` is called after the
        retry time.

        Args:
          payload: the payload of a push, or None for any other message.
          again: the function that is called with the server and the message.
        """
        lost = self._retry(lambda: again(server, message))

        def deliver() -> None:
            if self.config.paused_until(server, self.now) is None:
                self._receive(server, message, payload)
            else:  # A paused server receives nothing.
                lost()

        size = 0 if payload is None else self._push_bytes[server]
        self.network.send(source, ("server", server), size, deliver, lost)

    def encoders(self, client: int) -> list[PushEncoder]:
        """Return the encoder of a new client for each server, or [] if pushes are not encoded."""
        return [PushEncoder(codes, client) for codes in self.codes]

    def _retry(self, again: Action) -> Action:
        """Return an action that plans `again` after the retry time."""
        return lambda: self.after(self.config.link.retry_seconds, again)

    def say(self, server: int, reply: Reply, payload: np.ndarray | None) -> None:
        """Send a server's reply to its client: a worker, or the aggregator of a rack.

        Args:
          payload: the parameters in the reply, or None for a reply without parameters.
        """
        if not self.racks:
            self.tell_worker(("server", server), server, reply, payload)
            return
        rack = self._rack_clients[reply.client]
        self.network.send(
            ("server", server),
            rack.node,
            0 if payload is None else payload.nbytes,
            lambda: rack.hear(server, reply, payload),
            lambda: rack.lost_reply(server, reply),
        )

    def tell_worker(
        self, source: Node, server: int, reply: Reply, payload: np.ndarray | None
    ) -> None:
        """Send a reply about a server's parameters to a worker.

        Args:
          payload: the parameters in the reply, or None for a reply without parameters.
        """
        worker = self._clients[reply.client]
        self.network.send(
            source,
            worker.node,
            0 if payload is None else payload.nbytes,
            lambda: worker.hear(server, reply, payload),
            lambda: worker.lost_reply(server, reply),
        )

    def _receive(self, server: int, message: Message, payload: np.ndarray | None) -> None:
        shard = self.shards[server]
        # Messages of a client that has been removed may still arrive, and are ignored.
        if message.stamp.client in shard.state.clocks.clocks:
            shard.receive(message, payload, self.now)
        if server == 0:
            self.curve.look(self.now)
        wake = protocol.wake(self.model, shard.state)
        if wake is not None:
            self.after(max(0.0, wake - self.now), lambda: self._tick(shard))

    def _tick(self, shard: ShardNode) -> None:
        until = self.config.paused_until(shard.number, self.now)
        if until is None:
            shard.tick(self.now)
        else:
            self.after(until - self.now, lambda: self._tick(shard))

    def check_reads(self, worker: WorkerNode) -> None:
        """Check that the parameters that a worker is about to use are as new as required."""
        if self.racks:
            # Nothing is checked here for a worker of a rack: the rack checks its copy when it
            # answers its workers.
            return
        for server, link in enumerate(worker.links):
            assert link.version is not None
            self.reads.check(server, link.clock, link.version)

    def _watch_values(self) -> None:
        if not self.values.watched:
            return
        for at in range(len(self.shards)):
            self.values.look([one.under_way(at) for one in self.workers if one.alive])

    def _gradients(self) -> int:
        return sum(worker.gradients for worker in self.workers)

    def _report(self) -> Report:
        end = self.now
        received, sent = self.network.received_bytes, self.network.sent_bytes
        return Report(
            params=joined_parameters(
                self.problem, self.shards, [shard.arrays.params for shard in self.shards]
            ),
            seconds=end,
            curve=tuple(self.curve.points),
            work=tuple(
                WorkerReport(one.gradients, one.busy_seconds, one.idle_seconds, one.crashes)
                for one in self.workers
            ),
            staleness=sum((shard.arrays.staleness for shard in self.shards), Counter()),
            updates_per_step=self.cluster.updates_per_step,
            dropped=sum((shard.dropped for shard in self.shards), Counter()),
            received_bytes=tuple(received["server", at] for at in range(len(self.shards))),
            sent_bytes=tuple(sent["server", at] for at in range(len(self.shards))),
            rack_received_bytes=tuple(received[rack.node] for rack in self.racks),
            lost=self.network.lost,
            reads=self.reads.count,
            largest_lead=self.reads.largest_lead,
            bound=self.reads.bound,
            largest_value=self.values.largest,
        )
