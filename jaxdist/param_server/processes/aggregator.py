"""The process of a rack's aggregator, with a port and a session for each server."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from itertools import count

from jaxdist.param_server.live.aggregator import Aggregator
from jaxdist.param_server.live.order import OrderLog, rack_log
from jaxdist.param_server.processes.setup import listening, run_experiment, run_of, wires_to
from jaxdist.runtime.children import Parent
from jaxdist.types import JsonObject

STATS_SECONDS = 1.0


class AggregatorProcess:
    """The aggregator of a rack: a server to its workers, and a client of each server.

    The aggregator's first client number is the number of the rack. A client number is never used
    twice: after the rack has left the servers, its next client number is larger by the number of
    racks. The supervisor admits each of these numbers before it is used.
    """

    def __init__(self, setup: JsonObject, parent: Parent) -> None:
        self.number, self.parent = setup["number"], parent
        _, sharded = run_experiment(setup)
        cluster, order = sharded.cluster, run_of(setup) / "order"
        codes = sharded.codes or (None,) * cluster.servers
        given = zip(sharded.layouts, wires_to(sharded, setup), codes, strict=True)
        self.aggregators = [
            Aggregator(
                layout,
                cluster.consistency,
                wire,
                count(self.number, len(cluster.racks)),
                cluster.racks[self.number],
                codes=coded,
                retry_seconds=cluster.processes.retry_seconds,
                gone=partial(self._gone, at),
                log=OrderLog(order / rack_log(self.number, at, setup["clock"])),
                failed=lambda reason: parent.say("failed", error=reason),
            )
            for at, (layout, wire, coded) in enumerate(given)
        ]
        first = cluster.servers * (1 + self.number)
        self.rpcs = [
            listening(one, cluster.processes, setup, first + at, cluster.workers)
            for at, one in enumerate(self.aggregators)
        ]
        self._over = threading.Event()
        self._teller = threading.Thread(target=self._tell)
        self._teller.start()
        parent.say("listening", ports=[rpc.port for rpc in self.rpcs])

    def order(self, what: JsonObject) -> None:
        """Carry out an order of the supervisor: a worker leaves, or a new worker may join."""
        for one in self.aggregators:
            match what:
                case {"leave": int(client)}:
                    one.leave(client)
                case {"admit": int(client)}:
                    one.admit(client)
                case _:
                    raise AssertionError(what)

    def close(self) -> None:
        """Close the ports and the sessions, and stop the thread."""
        for rpc, one in zip(self.rpcs, self.aggregators, strict=True):
            rpc.close()
            one.close()
        self._over.set()
        self._teller.join()

    def _gone(self, server: int, client: int) -> None:
        self.parent.say("gone", server=server, client=client)

    def _tell(self) -> None:
        while not self._over.wait(STATS_SECONDS):
            total: Counter[str] = Counter()
            for one in self.aggregators:
                total.update(one.stats())
            self.parent.say("forwarded", stats=total)
