"""The process of a table server, which needs neither the model nor the data of its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from jaxdist.errors import JaxdistError
from jaxdist.models.recommend.rows import RowForm
from jaxdist.param_server.consistency.contract import Clocks
from jaxdist.param_server.processes.setup import run_of
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.param_server.tables.server import TableServer
from jaxdist.param_server.tables.store import RowStore
from jaxdist.param_server.training.table_files import read_tables, write_tables
from jaxdist.runtime.children import Parent
from jaxdist.train.strategy.config import Hybrid
from jaxdist.types import JsonObject
from jaxdist.wire.rpc import RpcServer
from jaxdist.wire.security import read_tls, read_token


class TableProcess:
    """A table server: its rows, its port, and its checkpoints."""

    def __init__(self, setup: JsonObject, parent: Parent) -> None:
        self.run, self.number, self.parent = run_of(setup), setup["number"], parent
        strategy = TypeAdapter(Hybrid).validate_json(setup["strategy"])
        self.about: JsonObject = setup["about"]
        form = RowForm(**self.about["form"])
        given: dict[str, Any] = {"server": self.number, "servers": strategy.servers}
        store = RowStore(form, strategy.optimizer, self.about["seed"], **given)
        step, clients, model = setup["step"], setup["clients"], strategy.consistency
        if step:
            for rows, values in read_tables(self.run, step, self.about):
                store.load(rows, values)
        version = step if model.type == "bsp" else step * clients
        state = RangeState(Clocks(clients, version=version, floor=step))
        self.server = TableServer(
            store, model, state, server=self.number, most_rows=setup["most_rows"]
        )
        for client in range(clients):
            self.server.join(client)
        processes = strategy.processes
        self.rpc = RpcServer(
            self.server,
            read_token(Path(setup["token"])),
            host=processes.host,
            port=processes.port and processes.port + self.number,
            tls=processes.tls and read_tls(processes.tls),
            sessions=4 * clients + 8,
        )
        self.strategy = strategy
        parent.say("listening", number=self.number, ports=[self.rpc.port])

    def order(self, what: JsonObject) -> None:
        """Follow an order of the run: save a step, or tell the counters."""
        if "save" not in what:
            stats = {**self.server.stats(), "rows": self.server.store.touched}
            self.parent.say("counted", number=self.number, stats=stats)
            return
        step = int(what["save"])
        about = {**self.about, "servers": self.strategy.servers}
        try:
            write_tables(self.run, self.number, step, about, *self.server.kept())
        except JaxdistError as error:
            self.parent.say("failed", error=str(error))
        else:
            self.parent.say("saved", step=step)

    def close(self) -> None:
        """Close the port and end the server."""
        self.rpc.close()
        self.server.close()
