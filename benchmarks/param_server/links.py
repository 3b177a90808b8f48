"""A click model on links of 1 Gbit/s: hybrid, a pure parameter server, and a dense all-reduce.

The first host of the lab has the servers, and each other host is a worker, which sleeps instead of
computing. All contenders exchange what a step of the same model needs:

- hybrid: the rows that a batch touches with the table server, and an all-reduce of the gradients of
  the dense parameters between workers;
- parameter server: the same rows, and all dense parameters and their gradients, with the server;
- all-reduce: the gradients of the dense parameters and of all rows, between workers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from benchmarks.collectives.program import compile_local, make_mesh, split
from benchmarks.core import lab
from benchmarks.core.hosts import Timed, Turn, clocked, in_rounds, on_hosts
from benchmarks.core.lab import Lab, LabLink
from benchmarks.core.report import Figure
from benchmarks.param_server.receivers import TOKEN
from benchmarks.param_server.serving import central, listening, served, shard_of, wire_to
from jaxdist.data.recommend.clicks import ClicksConfig
from jaxdist.data.source import take
from jaxdist.models.recommend.rows import RowForm
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.live.client import Client
from jaxdist.param_server.live.linked import Timeouts
from jaxdist.param_server.live.server import Server
from jaxdist.tables.client import TableClient
from jaxdist.tables.keys import touched_rows, unique_rows
from jaxdist.tables.messages import payload_spec, spec_of_reply
from jaxdist.tables.optimizer import RowAdagrad
from jaxdist.tables.server import TableServer, TableShard
from jaxdist.tables.store import RowStore
from jaxdist.wire.rpc import RpcWire

WORKERS, BATCH, WIDTH = 3, 512, 16
CLICKS = ClicksConfig(type="clicks", fields=26, ids=40_000, examples=2**20, heldout_examples=0)
DENSE = 2**20
"""The number of dense parameters, as in a top MLP 1024-512-256 with a bottom MLP."""
STEP_SECONDS = 0.01
TABLE_PORT, DENSE_PORT = 9930, 9931
PATIENCE = Timeouts(120.0, 120.0)
LINK = LabLink(1e9)
HYBRID, SERVER, RING = "hybrid", "parameter server", "all-reduce"


def form() -> RowForm:
    """Return the shapes and initial values of the tables."""
    return RowForm({f"field_{at}": CLICKS.ids for at in range(CLICKS.fields)}, WIDTH, 0.01)


def figures(repeats: int = 5) -> list[Figure]:
    """Compare bytes and times of a step.

    Args:
      repeats: counted rounds, in each of which every contender takes two steps.
    """
    hosts = Lab(sites=1 + WORKERS, across=LINK)
    reason = lab.unavailable(hosts)
    if reason:
        return [Figure.skipped("a click model on links of 1 Gbit/s", reason)]
    timed = {one.name: one for one in on_hosts(hosts, play, repeats)}
    found, server, ring = (timed[name] for name in (HYBRID, SERVER, RING))
    note = (
        f"{WORKERS} workers, {CLICKS.fields} tables of {CLICKS.ids:,} rows x {WIDTH}, {DENSE:,} "
        f"dense parameters, {BATCH} examples, {STEP_SECONDS:g} s of sleep for a gradient"
    )
    busiest = "sent by the busiest host in a step, headers included; " + note
    return [
        Figure("bytes beside a parameter server", found.sent_bytes, server.sent_bytes, "<= 0.6",
               "B", busiest),
        Figure("bytes beside an all-reduce", found.sent_bytes, ring.sent_bytes, "", "B", busiest),
        _rate("steps beside a parameter server", found, server, ">= 2", note),
        _rate("steps beside an all-reduce", found, ring, ">= 5", note),
    ]  # fmt: skip


def _rate(name: str, ours: Timed, other: Timed, goal: str, note: str) -> Figure:
    ratios = [b / a for a, b in zip(ours.seconds, other.seconds, strict=True)]
    rate, beside = (1 / statistics.median(one.seconds) for one in (ours, other))
    return Figure(name, rate, beside, goal, "1/s", note, paired_ratio=statistics.median(ratios))


def play(repeats: int) -> list[Timed]:
    """Run one host of the lab, and return the times of all contenders."""
    host = Lab(sites=1 + WORKERS).address(0)
    with ExitStack() as stack:
        if jax.process_index() == 0:
            stack.enter_context(listening(_table_server(), host, TABLE_PORT))
            params = {"w": np.zeros(DENSE, np.float32)}
            dense = served(shard_of(central(params), BSP(), params, 0.1), BSP(), WORKERS)
            stack.enter_context(listening(dense, host, DENSE_PORT))
            multihost_utils.sync_global_devices("servers")
            turns: dict[str, Turn] = {
                name: clocked(lambda: None) for name in (HYBRID, SERVER, RING)
            }
        else:
            multihost_utils.sync_global_devices("servers")
            turns = _worker(host, jax.process_index() - 1, stack)
        return in_rounds(turns, warmup=2, repeats=repeats, steps=2)


def _table_server() -> Server:
    store = RowStore(form(), RowAdagrad(learning_rate=0.01), 0)
    shard: Any = TableShard(store, WORKERS * BATCH * CLICKS.fields)
    return served(shard, BSP(), WORKERS, kind=TableServer)


def _worker(host: str, number: int, stack: ExitStack) -> dict[str, Turn]:
    spec = payload_spec(0, BATCH * CLICKS.fields, WIDTH)
    wire = RpcWire(f"{host}:{TABLE_PORT}", TOKEN, partial(spec_of_reply, spec=spec))
    tables = TableClient(number, BSP(), [wire], WIDTH, patience=PATIENCE)
    stack.callback(tables.close)
    layout = central({"w": np.zeros(DENSE, np.float32)})
    wires = [wire_to(f"{host}:{DENSE_PORT}", layout.spec)]
    dense = stack.enter_context(Client(number, BSP(), [layout], wires, patience=PATIENCE))
    reduce, every = _all_reduce(DENSE), _all_reduce(DENSE + form().rows * WIDTH)
    change = np.full(DENSE, 1e-6, np.float32)
    source, step = CLICKS.build().train, [0]

    def rows() -> np.ndarray:
        step[0] += 1
        first = (step[0] * WORKERS + number) * BATCH
        ids = take(source, np.arange(first, first + BATCH) % len(source))["ids"]
        return unique_rows(touched_rows(form(), ids).reshape(-1))[0]

    def of_tables(middle: Callable[[], object]) -> None:
        touched = rows()
        values = tables.pull(touched)
        middle()
        tables.push(touched, values * np.float32(1e-3), 0.01)

    def compute() -> None:
        time.sleep(STEP_SECONDS)

    def hybrid() -> None:
        of_tables(lambda: (compute(), reduce()))

    def server() -> None:
        of_tables(lambda: (dense.read(), compute(), dense.push([change])))

    def ring() -> None:
        compute()
        every()

    def twice(step: Callable[[], None], settle: Callable[[], None]) -> Turn:
        def call() -> None:
            step()
            step()
            settle()

        return clocked(call)

    def settle() -> None:
        tables.drain()
        dense.drain()

    return {
        HYBRID: twice(hybrid, tables.drain),
        SERVER: twice(server, settle),
        RING: twice(ring, lambda: None),
    }


def _all_reduce(length: int) -> Callable[[], object]:
    """Return a mean of `length` float32 over the workers, which waits for its result."""
    mesh = make_mesh(jax.devices()[1:], [WORKERS], ["data"])
    mine = np.ones((1, length), np.float32)
    given = jax.make_array_from_process_local_data(split(mesh), mine, (WORKERS, length))
    run = compile_local(partial(jax.lax.pmean, axis_name="data"), mesh, given)
    return lambda: jax.block_until_ready(run(given))
