"""The table servers of a run, which process 0 starts next to the processes that train."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax

from jaxdist.checkpoint.agree import broadcast_json, gather_json
from jaxdist.checkpoint.identity import given_identity
from jaxdist.checkpoint.layout import steps_present
from jaxdist.errors import RunError
from jaxdist.param_server.live.client import Timeouts
from jaxdist.param_server.tables.client import TableClient
from jaxdist.param_server.tables.messages import payload_spec, spec_of_reply
from jaxdist.param_server.training.children import RunProcess
from jaxdist.param_server.training.hybrid import TableProgram, about_tables
from jaxdist.param_server.training.table_files import prune_tables
from jaxdist.runtime.children import Event, end_together, how_ended
from jaxdist.runtime.forks import ForkServer
from jaxdist.train.strategy.config import Hybrid
from jaxdist.train.strategy.contract import Prepared
from jaxdist.types import JsonObject
from jaxdist.wire.rpc import RpcWire
from jaxdist.wire.security import make_token, read_tls, read_token


@dataclass
class TableServers:
    """The table servers of a run, which process 0 has started; other processes have none."""

    children: list[RunProcess] = field(default_factory=list)
    events: SimpleQueue[Event] = field(default_factory=SimpleQueue)
    clients: list[TableClient] = field(default_factory=list)
    answers: SimpleQueue[JsonObject | str] = field(default_factory=SimpleQueue)

    def listen(self) -> None:
        """Pass on what servers say, and end waits when one has died; runs in a thread."""
        while True:
            event = self.events.get()
            if event.code is None and event.what.get("event") == "failed":
                self.answers.put(f"{event.child}: {event.what['error']}")
            elif event.code is None:
                self.answers.put(event.what)
            elif event.child in self.children:
                words = event.child.last_words()
                reason = (
                    f"{event.child} ended ({how_ended(event.code)}) and with it the rows that it "
                    f"held; continue from the newest checkpoint with --resume. {words}"
                ).strip()
                self.answers.put(reason)
                for client in self.clients:
                    client.fail(reason)
            else:
                return

    def all_say(self, name: str) -> list[JsonObject]:
        """Wait until every server has sent a message of this name, and return the messages.

        Raises:
          RunError: a server failed or died.
        """
        found: list[JsonObject] = []
        while len(found) < len(self.children):
            what = self.answers.get()
            if isinstance(what, str):
                raise RunError(what)
            if what.get("event") == name:
                found.append(what)
        return found

    def tell(self, what: JsonObject) -> None:
        """Send an order to every server."""
        for child in self.children:
            child.say(what)

    def close(self) -> None:
        """End all servers."""
        ended, self.children = self.children, []
        end_together(ended)


@contextmanager
def with_tables(
    strategy: Hybrid, prepared: Prepared, *, module: str, checkpoints: Path
) -> Iterator[Prepared]:
    """Start the servers, and yield the run with steps that pull from them and push to them.

    Args:
      module: the Python module whose process forks the servers (`jaxdist.runtime.forks`).
      checkpoints: folder of the run's checkpoints, with which tables are deleted.

    Raises:
      RunError: a server did not start, or ended.
      CheckpointError: the tables of the step to continue from are not whole.
    """
    rows, directory = prepared.rows, prepared.directory
    assert rows is not None
    assert directory is not None
    batch = prepared.stages[0].program.batch
    most = prod(batch["ids"].shape)
    with ExitStack() as stack:
        servers = TableServers()
        stack.callback(servers.close)
        found = _started(strategy, prepared, servers, most, stack, module)
        ports, token = broadcast_json(found)
        client = _client(strategy, ports, token, rows.form.width, most)
        servers.clients.append(client)
        stack.callback(client.close)
        rows.fetch = client.pull
        rate, processes = strategy.optimizer.learning_rate, jax.process_count()
        (stage,) = prepared.stages  # batches of several sizes are refused
        program: Any = TableProgram(stage.program, rows, client, rate, processes)
        rows.save = partial(_save, servers, program, prepared, checkpoints)
        yield replace(prepared, stages=[replace(stage, program=program)])
        client.drain()


def _started(
    strategy: Hybrid,
    prepared: Prepared,
    servers: TableServers,
    most: int,
    stack: ExitStack,
    module: str,
) -> list[Any]:
    """Start the servers in process 0; return their ports and the token, to be broadcast."""
    rows, directory = prepared.rows, prepared.directory
    assert rows is not None
    assert directory is not None
    if jax.process_index():
        return []
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxdist-")))
    path = strategy.processes.token
    if path is None:
        path = folder / "token"
        make_token(path)
    log = directory / "logs"
    log.mkdir(exist_ok=True)
    forks = ForkServer(module, log / "forks.log")
    forks.start()
    stack.callback(forks.close)
    setup: JsonObject = {
        "run": {"id": given_identity(directory).id, "path": str(directory)},
        "strategy": strategy.model_dump_json(),
        "about": about_tables(rows, strategy.optimizer),
        "token": str(path.absolute()),
        "step": int(prepared.state.step),
        "clients": jax.process_count(),
        "most_rows": most,
    }
    for number in range(strategy.servers):
        name = log / f"table_{number}.log"
        given = {"forks": forks, "log": name, "events": servers.events}
        servers.children.append(RunProcess("table", number, {**setup, "number": number}, **given))
    threading.Thread(target=servers.listen, name="tables", daemon=True).start()
    numbers: dict[int, int] = {}
    for what in servers.all_say("listening"):
        numbers[what["number"]] = what["ports"][0]
    return [[numbers[number] for number in range(strategy.servers)], read_token(path)]


def _client(strategy: Hybrid, ports: list[int], token: str, width: int, most: int) -> TableClient:
    settings = strategy.processes
    tls = settings.tls and read_tls(settings.tls)
    wires = [
        RpcWire(
            f"{settings.host}:{port}",
            token,
            partial(spec_of_reply, spec=payload_spec(server, most, width)),
            tls,
        )
        for server, port in enumerate(ports)
    ]
    patience = Timeouts(settings.deadline_seconds, settings.retry_seconds)
    given = jax.process_index(), strategy.consistency, wires, width
    return TableClient(*given, patience=patience)


def _save(
    servers: TableServers, program: TableProgram, prepared: Prepared, checkpoints: Path, step: int
) -> None:
    """Save the tables of a step, once every process's pushes are applied."""
    directory = prepared.directory
    assert directory is not None
    program.client.drain()
    gather_json(step)
    servers.tell({"save": step})
    servers.all_say("saved")
    servers.tell({"count": step})
    if servers.children:
        counted = servers.all_say("counted")
        prepared.record(step, _counters(program, counted))
        prune_tables(directory, [step, *steps_present(checkpoints)])
    gather_json(step)


def _counters(program: TableProgram, counted: list[JsonObject]) -> dict[str, float]:
    """Return what process 0 and the servers did so far."""
    found: dict[str, float] = dict(program.counts)
    found["unique_ratio"] = found.get("unique_ids", 0) / max(1, found.get("ids", 0))
    found["waited_seconds"] = program.client.waited_seconds
    for number, what in enumerate(sorted(counted, key=lambda one: one["number"])):
        stats = what["stats"]
        for name in ("rows", "staleness_mean", "staleness_max", "applied", "dropped"):
            found[f"table_{number}_{name}"] = stats[name]
    return found
