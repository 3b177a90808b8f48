"""The process of a table server, which needs neither the model nor the data of its run."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pydantic import TypeAdapter

from jaxdist.errors import JaxdistError
from jaxdist.param_server.consistency.contract import Clocks
from jaxdist.param_server.processes.setup import listening, run_of, server_place
from jaxdist.param_server.protocol import server as protocol
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.replication.decision import RangeView
from jaxdist.replication.seat import Seat
from jaxdist.runtime.children import Parent
from jaxdist.tables.bounded import open_store
from jaxdist.tables.messages import spec_of_reply
from jaxdist.tables.server import ReplicatedTables, TableShard
from jaxdist.tables.store import RowStore
from jaxdist.tables.training.files import TableWriter, form_of, read_tables
from jaxdist.train.strategy.config import Hybrid
from jaxdist.types import JsonObject
from jaxdist.wire.contract import Service
from jaxdist.wire.ports import Place, place_address
from jaxdist.wire.rpc import RpcServer, RpcWire
from jaxdist.wire.security import read_tls, read_token


class TableProcess:
    """A table server, with the ranges of rows that it leads or copies, and their ports."""

    def __init__(self, setup: JsonObject, parent: Parent) -> None:
        self.run, self.number, self.parent = run_of(setup), setup["number"], parent
        self.strategy = TypeAdapter(Hybrid).validate_json(setup["strategy"])
        self.about: JsonObject = setup["about"]
        self._setup, self._token = setup, read_token(Path(setup["token"]))
        self._tls = read_tls(self.strategy.processes.tls)
        self._rpcs: dict[int, list[RpcServer]] = {}
        self.seats: dict[int, Seat] = {}
        self._writers: dict[int, TableWriter] = {}
        # Orders may take long, so a separate thread executes them. Meanwhile this process must
        # answer the question whether it is alive.
        self._orders: SimpleQueue[JsonObject | None] = SimpleQueue()
        self._orderly = threading.Thread(target=self._follow_orders)
        self._orderly.start()
        # The signal may interrupt a report, so the other thread sends the request to leave.
        if not setup.get("stays"):
            signal.signal(signal.SIGTERM, lambda *_: self._orders.put({"leave": True}))
        for at in setup["leads"]:
            self._orders.put({"lead": at})

    def order(self, what: JsonObject) -> None:
        """Queue an order of process 0, or answer its question whether this process is alive."""
        if "alive" in what:
            self.parent.say("alive")
        else:
            self._orders.put(what)

    def _follow_orders(self) -> None:
        while (what := self._orders.get()) is not None:
            try:
                self._follow(what)
            except JaxdistError as error:
                self.parent.say("failed", error=str(error))
            except Exception:
                # The whole process ends, because without this thread it would be alive, but would
                # execute no order.
                traceback.print_exc()
                os._exit(1)

    def _follow(self, what: JsonObject) -> None:
        match what:
            case {"lead": int(at)}:
                self._sit(at, leads=True)
            case {"leave": _}:
                self.parent.say("leaves")
            case {"follow": int(at)}:
                self._sit(at, leads=False)
            case {"drop": int(at)}:
                self._give_up(at)
            case {"view": order, "ports": ports, "range": int(at)}:
                self.seats[at].view(RangeView(*order), dict(ports))
            case {"save": int(step), "range": int(at)}:
                self._writer(at).write(step)
                self.parent.say("done", range=at)
            case {"count": _, "range": int(at)}:
                server = self._leader(at)
                stats = {**server.stats(), "rows": server.store.touched}
                stats["evicted"] = server.store.evicted
                self.parent.say("done", range=at, stats=stats)
            case _:
                raise AssertionError(what)

    def _writer(self, at: int) -> TableWriter:
        """Return the writer of a range. A new writer begins with all rows.

        Args:
          at: the number of the range.
        """
        if at not in self._writers:
            about = {**self.about, "servers": self.strategy.range_count}
            self._writers[at] = TableWriter(self.run, at, about, self._leader(at).kept)
        return self._writers[at]

    def _leader(self, at: int) -> ReplicatedTables:
        server = self.seats[at].server
        assert isinstance(server, ReplicatedTables)
        return server

    def _sit(self, at: int, *, leads: bool) -> None:
        """Become the leader of a range, or begin to follow its leader.

        Args:
          at: the number of the range.
          leads: whether to become the leader.
        """
        self._give_up(at)
        strategy, setup = self.strategy, self._setup
        given = {"server": at, "servers": strategy.range_count}
        form = form_of(self.about, strategy.most_rows or 0)
        store = open_store(form, strategy.optimizer, self.about["seed"], **given)
        shard: Any = TableShard(store, setup["most_rows"] * setup["clients"])
        self.seats[at] = Seat(
            self.number,
            shard,
            strategy.consistency,
            self._begun(store) if leads else None,
            opens=partial(self._opens, at),
            wire_to=partial(self._wire_to, shard),
            say=lambda what: self.parent.say(**what),
            kind=ReplicatedTables,
        )

    def _give_up(self, at: int) -> None:
        """Give up this server's role in a range, if any, and the rows and ports of the range.

        Args:
          at: the number of the range.
        """
        self._writers.pop(at, None)
        for rpc in self._rpcs.pop(at, []):
            rpc.close()
        seat = self.seats.pop(at, None)
        if seat is not None:
            seat.close()

    def _begun(self, store: RowStore) -> RangeState:
        """Load the rows of the step to continue from; return the protocol's state at that step."""
        step, clients = self._setup["step"], self._setup["clients"]
        model = self.strategy.consistency
        if step:
            for rows, values in read_tables(self.run, step, self.about):
                store.load(rows, values)
        version = step if model.type == "bsp" else step * clients
        state = RangeState(Clocks(clients, version=version, floor=step))
        for client in range(clients):
            state = protocol.join(model, state, client).state
        return state

    def _opens(self, at: int, service: Service) -> Place:
        given = (self.strategy.processes, self._setup, self.number, self._setup["clients"])
        rpc = listening(service, *given)
        self._rpcs.setdefault(at, []).append(rpc)
        return server_place(self._setup, rpc)

    def _wire_to(self, shard: TableShard, place: Place) -> RpcWire:
        spec_of = partial(spec_of_reply, spec=shard.layout.spec)
        address = place_address(self.strategy.processes.host, place)
        return RpcWire(address, self._token, spec_of, self._tls)

    def close(self) -> None:
        """Close all ports and end all servers."""
        self._orders.put(None)
        self._orderly.join()
        for at in [*self.seats]:
            self._give_up(at)
