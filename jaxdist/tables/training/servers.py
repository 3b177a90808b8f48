"""The table servers of a run, which process 0 starts next to the processes that train."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax

from jaxdist.checkpoint.agree import broadcast_json, gather_json
from jaxdist.checkpoint.identity import given_identity
from jaxdist.checkpoint.layout import steps_present
from jaxdist.param_server.live.linked import Timeouts
from jaxdist.runtime.children import Event
from jaxdist.runtime.forks import ForkServer
from jaxdist.tables.client import TableClient
from jaxdist.tables.keys import row_dtype
from jaxdist.tables.messages import payload_spec, spec_of_reply
from jaxdist.tables.training.files import about_tables, prune_tables
from jaxdist.tables.training.program import LookAheadLoader, TableProgram
from jaxdist.tables.training.request import take_request
from jaxdist.tables.training.team import TableTeam
from jaxdist.train.strategy.config import Hybrid
from jaxdist.train.strategy.contract import Prepared
from jaxdist.types import JsonObject
from jaxdist.wire.children import RunProcess
from jaxdist.wire.config import address_here
from jaxdist.wire.gate import RemoteProcess, open_gate
from jaxdist.wire.kept import Board, read_board, spec_of_board
from jaxdist.wire.ports import Place, place_address
from jaxdist.wire.rpc import RpcServer, RpcWire
from jaxdist.wire.security import read_tls, read_token, token_file


@contextmanager
def with_tables(
    strategy: Hybrid, prepared: Prepared, *, module: str, checkpoints: Path
) -> Iterator[Prepared]:
    """Start the table servers, and yield the run with steps that pull rows and push gradients.

    Args:
      module: the Python module whose process forks the servers (`jaxdist.runtime.forks`).
      checkpoints: the folder of the run's checkpoints; the tables of a deleted checkpoint are
        deleted too.

    Raises:
      RunError: a server did not start, or ended.
      CheckpointError: the tables of the step to continue from are incomplete or damaged.
    """
    host = broadcast_json(address_here(strategy.processes.host))
    settings = strategy.processes.listening_on(host)
    strategy = strategy.model_copy(update={"processes": settings})
    rows, directory = prepared.rows, prepared.directory
    assert rows is not None
    batch = prepared.stages[0].program.batch
    most = prod(batch["ids"].shape)
    with ExitStack() as stack:
        team, token = None, ""
        if not jax.process_index():
            setup: JsonObject = {
                "run": {"id": given_identity(directory).id, "path": str(directory)},
                "about": about_tables(rows, strategy.optimizer),
                "step": int(prepared.state.step),
                "clients": jax.process_count(),
                "most_rows": most,
            }
            team, token = start_team(strategy, setup, stack, module, prepared.note)
        token, leaders = broadcast_json([token, team and [*team.leaders]])
        wires = Wires(strategy, token, rows.form.width, most)
        client = wires.client(leaders, jax.process_index())
        stack.callback(client.close)
        _follow_moves(team, client, wires, stack)
        rows.fetch = client.pull
        rate, processes = strategy.optimizer.learning_rate, jax.process_count()
        # A run with batches of several sizes was refused, so there is exactly one stage.
        (stage,) = prepared.stages
        loader: Any = LookAheadLoader(stage.loader)
        ahead = strategy.consistency.ahead
        following = (lambda: loader.following) if ahead else (lambda: None)
        program: Any = TableProgram(stage.program, rows, client, rate, processes, following)
        rows.save = partial(_save, team, program, prepared, checkpoints)
        served = replace(stage, program=program, loader=loader if ahead else stage.loader)
        yield replace(prepared, stages=[served])
        client.drain()


def start_team(
    strategy: Hybrid, setup: JsonObject, stack: ExitStack, module: str, note: Callable[[str], None]
) -> tuple[TableTeam, str]:
    """Start the servers, and return their team and the secret token that clients need.

    The servers end when the stack closes.

    Args:
      setup: the common setup of the servers: the run, the description of the rows (about), the step
        to continue from, the number of clients, and the largest number of rows in a message
        (most_rows).

    Raises:
      RunError: a server did not start.
    """
    path = stack.enter_context(token_file(strategy.processes.token))
    run = Path(setup["run"]["path"])
    log = run / "logs"
    log.mkdir(exist_ok=True)
    forks = ForkServer(module, log / "forks.log")
    forks.start()
    stack.callback(forks.close)
    own = {"strategy": strategy.model_dump_json(), "address": strategy.processes.host}
    setup = {**setup, **own, "token": str(path)}

    def begin(
        number: int,
        leads: list[int],
        events: SimpleQueue[Event],
        remote: RemoteProcess | None,
    ) -> RunProcess:
        given = {**setup, "number": number, "leads": leads}
        name = log / f"table_{number}.log"
        start = (remote or forks).begin
        return RunProcess("table", number, given, begin=start, log=name, events=events)

    team, token = TableTeam(strategy, begin, note, partial(take_request, run)), read_token(path)
    if not strategy.processes.port:  # A run with fixed ports takes no further servers.
        open_gate(run, strategy.processes, token, team.offer, stack)
    # The team closes before the gate, because the team ends the servers of other hosts through the
    # gate.
    stack.callback(team.close)
    team.start()
    return team, token


@dataclass(frozen=True)
class Wires:
    """The connections of this process to table servers."""

    strategy: Hybrid
    token: str
    width: int
    most: int

    def to(self, server: int, port: Place) -> RpcWire:
        """Return a connection to the leader of a range.

        Args:
          server: the number of the range.
          port: the address of the leader (`jaxdist.wire.ports.Place`).
        """
        settings = self.strategy.processes
        kind = row_dtype(self.strategy.most_rows or 0)
        spec = payload_spec(server, self.most, self.width, kind)
        address, tls = place_address(settings.host, port), read_tls(settings.tls)
        return RpcWire(address, self.token, partial(spec_of_reply, spec=spec), tls)

    def client(self, leaders: Sequence[tuple[Place, int]], number: int) -> TableClient:
        """Return a client of the leaders of all ranges, given the leaders' addresses and epochs."""
        settings = self.strategy.processes
        wires = [self.to(server, port) for server, (port, _) in enumerate(leaders)]
        patience = Timeouts(settings.deadline_seconds, settings.retry_seconds)
        given = number, self.strategy.consistency, wires, self.width
        kept = self.strategy.most_rows or 0
        client = TableClient(*given, most=kept, patience=patience)
        for server, (port, epoch) in enumerate(leaders):
            client.move(server, self.to(server, port), epoch)
        return client


def _follow_moves(
    team: TableTeam | None, client: TableClient, wires: Wires, stack: ExitStack
) -> None:
    """Let every process move its sessions from now on, whenever a server takes over.

    All processes call this function together. Process 0 publishes the new leaders, and the other
    processes read them. If the servers have fixed ports, no session ever moves.

    Args:
      team: the team of table servers, or None in processes other than process 0.
    """

    def moved(server: int, port: Place, epoch: int) -> None:
        client.move(server, wires.to(server, port), epoch)

    board: Board | None = None
    settings = wires.strategy.processes
    # Servers at fixed ports have no followers that take over, so the sessions of clients never
    # move.
    shared = jax.process_count() > 1 and not settings.port
    tls = read_tls(settings.tls)
    port = 0
    if team is not None and shared:
        board = Board(json.dumps(team.leaders))
        rpc = RpcServer(board, wires.token, host=settings.host, tls=tls)
        stack.callback(rpc.close)
        port = rpc.port
    port = broadcast_json(port)
    if team is None:
        if shared:

            def seen(text: str) -> None:
                for server, (at, epoch) in enumerate(json.loads(text)):
                    if at:
                        moved(server, at, epoch)

            wire = RpcWire(f"{settings.host}:{port}", wires.token, spec_of_board, tls)
            stack.callback(read_board(wire, seen).close)
        return

    def heard(server: int, port: Place, epoch: int) -> None:
        moved(server, port, epoch)
        if board is not None:
            board.show(json.dumps(team.leaders))

    team.follow(client.fail, heard)


def _save(
    team: TableTeam | None,
    program: TableProgram,
    prepared: Prepared,
    checkpoints: Path,
    step: int,
) -> None:
    """Save the tables of a step, once every process's pushes are applied.

    Args:
      team: the team of table servers, or None in processes other than process 0.
    """
    directory = prepared.directory
    program.client.drain()
    gather_json(step)
    if team is not None:
        team.ask({"save": step})
        counted = team.ask({"count": step})
        prepared.record(step, _counters(program, counted))
        prune_tables(directory, [step, *steps_present(checkpoints)])
    gather_json(step)


def _counters(program: TableProgram, counted: list[JsonObject]) -> dict[str, float]:
    """Return the counters of process 0 and of the servers, by name."""
    found: dict[str, float] = dict(program.counts)
    found["unique_ratio"] = found.get("unique_ids", 0) / max(1, found.get("ids", 0))
    found["waited_seconds"] = program.client.waited_seconds
    for number, what in enumerate(counted):
        stats = what["stats"]
        for name in ("rows", "evicted", "staleness_mean", "staleness_max", "applied", "dropped"):
            found[f"table_{number}_{name}"] = stats[name]
    return found
