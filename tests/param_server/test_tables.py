"""Sparse tables on servers: rows, optimizers, messages, checkpoints, and training beside a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from benchmarks.param_server import local_wire as local
from benchmarks.param_server.local_wire import LocalWire
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.layout import steps_present
from jaxdist.config import Document, validate
from jaxdist.errors import CheckpointError, ConfigError, RunError
from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.models.recommend.rows import RowForm
from jaxdist.param_server.consistency.arrival import SSP, Asynchronous
from jaxdist.param_server.consistency.contract import Clocks, Consistency
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.live.linked import Timeouts
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.run.tiers import open_tiers
from jaxdist.tables.bounded import open_store
from jaxdist.tables.client import TableClient
from jaxdist.tables.keys import touched_rows
from jaxdist.tables.messages import pack, spec_of_reply, step_bytes
from jaxdist.tables.optimizer import (
    RowAdagrad,
    RowLazyAdam,
    RowOptimizer,
    RowSgd,
)
from jaxdist.tables.server import TableServer, TableShard
from jaxdist.tables.store import RowStore, summed
from jaxdist.tables.training.files import (
    TableWriter,
    prune_tables,
    read_tables,
    tables_problem,
    write_tables,
)
from jaxdist.tables.training.program import LookAheadLoader, TableProgram
from jaxdist.train.evaluate import evaluate
from jaxdist.train.strategy.config import Hybrid, Synchronous
from jaxdist.wire.frames import HEADER_BYTES

FORM = RowForm({"user": 300, "item": 100}, 4, 0.1)
SEED = 7
MOST = 512


class Tables:
    """Table servers in this process, and clients of them."""

    def __init__(
        self,
        optimizer: RowOptimizer,
        servers: int = 2,
        clients: int = 1,
        *,
        model: Consistency | None = None,
        form: RowForm = FORM,
        seed: int = SEED,
    ) -> None:
        self.model, self.form = model or BSP(), form
        self.stores = [
            open_store(form, optimizer, seed, server=at, servers=servers) for at in range(servers)
        ]
        self.servers = [
            TableServer(TableShard(store, MOST), self.model, RangeState(Clocks(clients)))
            for store in self.stores
        ]
        for server in self.servers:
            for client in range(clients):
                server.join(client)

    def client(self, number: int = 0, *, width: int | None = None, wait: float = 20) -> TableClient:
        width = width or self.form.width
        wires = [
            LocalWire(one, partial(spec_of_reply, spec=one._table.layout.spec))
            for one in self.servers
        ]
        most = self.form.most
        return TableClient(number, self.model, wires, width, most=most, patience=Timeouts(wait))

    @contextmanager
    def clients(self, count: int) -> Iterator[list[TableClient]]:
        with ExitStack() as stack:
            found = [self.client(number) for number in range(count)]
            for server in self.servers:
                stack.callback(server.close)
            for one in found:
                stack.callback(one.close)
            yield found

    def whole(self) -> np.ndarray:
        """All rows of all servers, with their state."""
        rows = np.arange(self.form.rows, dtype=np.uint32)
        found = np.zeros((self.form.rows, self.stores[0].columns), np.float32)
        found[:, : self.form.width] = self.form.initial(np.array(SEED, np.uint32), rows)
        for store in self.stores:
            known, values = store.kept()
            found[known] = values
        return found


def _steps(count: int, clients: int) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Unique rows and gradients of each client in each step; clients share rows."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(count):
        rows = [
            np.sort(random.choice(20, 8, replace=False)).astype(np.uint32) for _ in range(clients)
        ]
        found.append([(one, random.normal(size=(8, 4)).astype(np.float32)) for one in rows])
    return found


def _trained(tables: Tables, steps: Sequence[Any], clients: int, rate: float = 0.1) -> np.ndarray:
    with tables.clients(clients) as found:
        for step in steps:
            for client, (rows, _) in zip(found, step, strict=True):
                client.pull(rows)
            for client, (rows, grads) in zip(found, step, strict=True):
                client.push(rows, grads, rate)
        for client in found:
            client.drain()
    return tables.whole()


def _dense(steps: Sequence[Any], optimizer: Any) -> np.ndarray:
    """Train a dense table by optax on the mean of the clients' gradients."""
    table = FORM.initial(np.array(SEED, np.uint32), np.arange(FORM.rows, dtype=np.uint32))
    state = optimizer.init(table)
    for step in steps:
        grads = np.zeros_like(table)
        for rows, found in step:
            grads[rows] += found / len(step)
        updates, state = optimizer.update(grads, state, table)
        table = np.asarray(optax.apply_updates(table, updates))
    return table


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(
    ("optimizer", "dense"),
    [
        (RowSgd(), optax.sgd(0.1)),
        (RowAdagrad(per="element", eps=1e-20), optax.adagrad(0.1, 0.0, 1e-20)),
    ],
)
def test_rows_equal_a_dense_table(optimizer: RowOptimizer, dense: Any, servers: int) -> None:
    """Rows of two clients are added before Adagrad squares them."""
    steps = _steps(4, 2)
    tables = Tables(optimizer, servers, 2)
    found = _trained(tables, steps, 2)
    np.testing.assert_allclose(found[:, :4], _dense(steps, dense), rtol=2e-5, atol=1e-6)
    touched = np.unique(np.concatenate([rows for step in steps for rows, _ in step]))
    assert sum(store.touched for store in tables.stores) == len(touched)


def test_adagrad_by_row_squares_the_mean_of_a_row() -> None:
    grads = np.array([[3.0, 4.0, 0.0, 0.0]], np.float32)
    rows = np.zeros((1, 5), np.float32)
    RowAdagrad(eps=1e-20).update(rows, grads, 0.1)
    np.testing.assert_allclose(rows[0], [*(-0.1 * grads[0] / 2.5), 6.25], rtol=1e-6)


def test_lazy_adam_counts_a_rows_own_updates() -> None:
    """A row that is touched at every step moves as under Adam, any other as if time stood still."""
    adam, own = optax.adam(0.1), np.zeros((1, 4), np.float32)
    lazy, rows, state = RowLazyAdam(), np.zeros((1, 13), np.float32), optax.adam(0.1).init(own)
    for grads in np.random.default_rng(0).normal(size=(3, 1, 4)).astype(np.float32):
        updates, state = adam.update(grads, state)
        own = np.asarray(optax.apply_updates(own, updates))
        lazy.update(rows, grads, 0.1)
    np.testing.assert_allclose(rows[:, :4], own, rtol=1e-5, atol=1e-6)
    assert rows[0, -1] == 3


def test_a_row_depends_on_neither_servers_nor_the_order_of_requests() -> None:
    rows = np.arange(0, 400, 3, dtype=np.uint32)
    first, again = Tables(RowSgd(), 1), Tables(RowSgd(), 3)
    with first.clients(1) as (one,), again.clients(1) as (other,):
        other.pull(np.array([399, 3], np.uint32))
        np.testing.assert_array_equal(one.pull(rows), other.pull(rows))
    assert [store.touched for store in again.stores] == [0, 0, 0], "rows are read, not updated"


def test_bytes_on_the_wire_are_those_of_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    whole = local.frames

    def counted(envelope: Any, *shared: Any) -> Iterator[bytes]:
        for frame in whole(envelope, *shared):
            if envelope.payload is not None:
                sent.append(len(frame))
            yield frame

    monkeypatch.setattr(local, "frames", counted)
    tables = Tables(RowSgd(), 2)
    rows = np.arange(400, dtype=np.uint32)
    with tables.clients(1) as (client,):
        values = client.pull(rows)
        client.push(rows, values, 0.1)
        client.drain()
        payloads = client.sent_bytes + client.received_bytes
    assert payloads == sum(step_bytes(200, 4) for _ in range(2))
    assert sum(sent) == payloads + HEADER_BYTES * len(sent)
    formula = 400 * (8 + 2 * 4 * 4)
    assert formula <= payloads <= 1.001 * formula
    assert len(sent) == 6


def test_asynchronous_rows_are_applied_on_arrival() -> None:
    tables = Tables(RowSgd(), 1, 2, model=Asynchronous(gradient_weight="whole"))
    rows = np.array([3], np.uint32)
    with tables.clients(2) as (one, other):
        before = one.pull(rows)
        other.pull(rows)
        other.push(rows, np.ones((1, 4), np.float32), 0.5)
        other.drain()
        np.testing.assert_allclose(one.pull(rows), before - 0.5, rtol=1e-6)
        one.push(rows, np.ones((1, 4), np.float32), 0.5)
        one.drain()
    assert tables.servers[0].stats()["staleness_max"] == 0


def test_rows_with_a_nan_change_nothing_and_are_counted() -> None:
    tables, rows = Tables(RowSgd(), 1), np.array([3, 5], np.uint32)
    with tables.clients(1) as (client,):
        before = client.pull(rows)
        client.push(rows, np.full((2, 4), np.nan, np.float32), 0.1)
        np.testing.assert_array_equal(client.pull(rows), before)
        assert tables.servers[0].stats()["dropped"] == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [([511, 512], "row 512 does not exist: the tables have 512 rows"), ([0] * 8 * MOST, "at most")],
)
def test_pulls_that_do_not_fit_a_servers_tables_are_refused(rows: list[int], message: str) -> None:
    tables = Tables(RowSgd(), 1)
    with tables.clients(1) as (client,), pytest.raises(RunError, match=message):
        client.pull(np.array(rows, np.uint32))


def test_a_push_of_another_width_is_refused() -> None:
    tables = Tables(RowSgd(), 1)
    with tables.clients(0):
        client = tables.client(width=5)
        client.pull(np.empty(0, np.uint32))
        client.push(np.array([3], np.uint32), np.ones((1, 5), np.float32), 0.1)
        with pytest.raises(
            RunError, match="does not fit the tables of this server, whose width is 4"
        ):
            client.drain()
        client.close()


def test_a_row_of_another_server_is_refused() -> None:
    store = RowStore(FORM, RowSgd(), SEED, server=1, servers=2)
    assert store.problem(np.array([1, 3], np.uint32)) is None
    assert "a different server" in str(store.problem(np.array([2], np.uint32)))


def test_a_server_that_does_not_answer_is_named() -> None:
    tables = Tables(RowSgd(), 1, 2)
    with tables.clients(1) as (client,):
        client.close()
        late = tables.client(wait=0.3)
        rows = np.array([3], np.uint32)
        late.pull(rows)
        late.push(rows, np.ones((1, 4), np.float32), 0.1)
        with pytest.raises(
            RunError, match=r"waited 0\.3 s for rows: table server 0 waits for clients 1 "
        ):
            late.pull(rows)
        late.fail("table server 0 ended")
        with pytest.raises(RunError, match="client 0: table server 0 ended"):
            late.drain()
        late.close()


@pytest.mark.parametrize("count", [0, 3])
def test_a_server_takes_the_rows_and_the_updates_of_another(count: int) -> None:
    leader, follower = (TableShard(RowStore(FORM, RowAdagrad(), SEED), MOST) for _ in range(2))
    rows, grads = np.arange(count, dtype=np.uint32), np.ones((count, 4), np.float32)
    leader.store.update(rows, grads, 0.1)
    follower.restore([np.frombuffer(one.tobytes(), np.uint8) for one in leader.arrays])
    change = pack(np.array([0.5], np.float32), np.array([7], np.uint32), grads[:1] + 1)
    if count:
        for shard in (leader, follower):
            shard.move(change, 0.5)
    for one, other in zip(leader.arrays, follower.arrays, strict=True):
        np.testing.assert_array_equal(one, other)


def test_duplicates_are_summed() -> None:
    rows, grads = summed(np.array([5, 2], np.uint32), np.array([[1.0], [2.0]]))
    assert (rows.tolist(), grads.tolist()) == ([2, 5], [[2.0], [1.0]])


@pytest.mark.parametrize("after", [1, 2, 4, 5])
def test_tables_of_three_servers_load_into_any_number(after: int, tmp_path: Path) -> None:
    tables, about = Tables(RowAdagrad(), 3), {"seed": SEED}
    whole = _trained(tables, _steps(3, 1), 1)
    for at, store in enumerate(tables.stores):
        write_tables(tmp_path, at, 20, {**about, "servers": 3}, *store.kept())
    again = Tables(RowAdagrad(), after)
    for rows, values in read_tables(tmp_path, 20, about):
        for store in again.stores:
            store.load(rows, values)
    np.testing.assert_array_equal(again.whole(), whole)
    assert sum(s.touched for s in again.stores) == sum(s.touched for s in tables.stores)
    for server in (*tables.servers, *again.servers):
        server.close()


def test_a_checkpoint_has_the_rows_that_changed_since_the_one_before(tmp_path: Path) -> None:
    """With the steps that it needs, it is all rows with the optimizer's state."""
    tables, about = Tables(RowAdagrad(), 2), {"seed": SEED}
    writers = [
        TableWriter(tmp_path, at, {**about, "servers": 2}, server.kept)
        for at, server in enumerate(tables.servers)
    ]
    wanted = {}
    for step in range(1, 8):
        for store in tables.stores:
            count = 50 if step == 1 else 20
            own = np.arange(step, step + count, dtype=np.uint32) * 2 + store.server
            store.update(own, np.ones((count, 4), np.float32), 0.1)
        wanted[step] = tables.whole()
        for writer in writers:
            writer.write(step)
    files = sorted(tmp_path.glob("tables/server_0/step_*/arrays/000000.bin"))
    # After two of 20 rows a third would exceed the 50 rows, so that all are written.
    assert [file.stat().st_size // 4 for file in files] == [50, 20, 20, 50, 20, 20, 50]

    def read(step: int) -> np.ndarray:
        again = Tables(RowAdagrad(), 3)
        for rows, values in read_tables(tmp_path, step, about):
            for store in again.stores:
                store.load(rows, values)
        for server in again.servers:
            server.close()
        return again.whole()

    for step, table in wanted.items():
        np.testing.assert_array_equal(read(step), table)
    prune_tables(tmp_path, [3])  # And the newest two: 7 has all rows, 6 needs 5, and 5 needs 4.
    assert steps_present(tmp_path / "tables/server_0") == [1, 2, 3, 4, 5, 6, 7]
    prune_tables(tmp_path, [2])
    assert steps_present(tmp_path / "tables/server_0") == [1, 2, 4, 5, 6, 7]
    other = np.zeros(1, np.uint32), np.ones((1, 5), np.float32)
    write_tables(tmp_path, 0, 5, {**about, "servers": 2, "id": "new"}, *other)
    with pytest.raises(CheckpointError, match="were replaced by another save"):
        read(6)
    for server in tables.servers:
        server.close()


def test_tables_on_disk_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    rows, values = np.arange(4, dtype=np.uint32), np.ones((4, 5), np.float32)
    for step in (10, 20, 30, 40):
        write_tables(tmp_path, 0, step, {"seed": 1, "servers": 1}, rows, values)
    with pytest.raises(CheckpointError, match="seed 1 there, 2 here; resume"):
        list(read_tables(tmp_path, 10, {"seed": 2}))
    assert "seed 1 there, 2 here" in str(tables_problem(tmp_path, 10, {"seed": 2}))
    assert tables_problem(tmp_path, 10, {"seed": 1}) is tables_problem(tmp_path, 50, {}) is None
    with pytest.raises(CheckpointError, match=r"(is|are) damaged"):
        list(read_tables(tmp_path, 50, {}))
    file = next(tmp_path.glob("tables/server_0/step_*20/arrays/000001.bin"))
    file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(CheckpointError, match=r"(is|are) damaged"):
        list(read_tables(tmp_path, 20, {}))
    prune_tables(tmp_path, [10])
    found = sorted(path.name for path in (tmp_path / "tables/server_0").iterdir())
    assert found == ["step_00000010", "step_00000030", "step_00000040"]


def test_a_run_with_tables_on_servers_has_no_snapshots_in_memory(tmp_path: Path) -> None:
    """They lack the tables, so that the run could not go on from them."""
    agent = SimpleNamespace(memory=tmp_path)
    for strategy, count in ((Synchronous(), 1), (Hybrid(), 0)):
        config = SimpleNamespace(checkpoint=CheckpointConfig(), strategy=strategy)
        files: Any = SimpleNamespace(agent=agent, config=config, store=lambda say: nullcontext())
        with ExitStack() as stack:
            assert len(open_tiers(files, print, stack).snapshots) == count


def test_tables_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    (tmp_path / "tables").write_text("")
    with pytest.raises(CheckpointError, match="cannot be saved"):
        write_tables(tmp_path, 0, 1, {}, np.zeros(1, np.uint32), np.zeros((1, 4), np.float32))


_SECTIONS: dict[str, Any] = {
    "model": {"type": "dlrm", "width": 8, "bottom": [8], "top": [8], "penalty": 0.01},
    "data": {"type": "clicks", "fields": 4, "ids": 64, "examples": 512, "heldout_examples": 60,
             "skew": 0.5, "dense": 3},
    "optim": {"type": "sgd", "momentum": 0.0, "learning_rate": 0.5,
              "schedule": {"type": "linear", "end_fraction": 0.1}},
    "train": {"steps": 4, "batch_size": 64},
}  # fmt: skip
_HYBRID = {"type": "hybrid", "servers": 2, "optimizer": {"type": "sgd"}}


def _experiment(devices: int, **sections: Any) -> Experiment:
    document = Document({**_SECTIONS, **sections})
    return build(validate(document, ExperimentConfig), document, devices=jax.devices()[:devices])


def _heldout(experiment: Experiment, state: Any) -> dict[str, float]:
    program, heldout = experiment.program, experiment.heldout
    assert heldout is not None
    with heldout.evaluation_batches() as batches:
        return evaluate(program, program.evaluated(state), state.buffers, batches)


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "sections"),
    [
        (1, {"mesh": {"data": 1}}),
        pytest.param(8, {"mesh": {"data": 8}}, marks=pytest.mark.slow),
        (8, {"mesh": {"data": 8}, "parallel": {"reduce": {"type": "ring"}, "zero": {"stage": 2}}}),
        (4, {"mesh": {"data": 2, "tensor": 2}}),
        (2, {"mesh": {"data": 2}, "strategy": {**_HYBRID, "most_rows": 4096}}),
    ],
)
def test_a_run_with_tables_on_servers_equals_one_device(
    devices: int, sections: dict[str, Any]
) -> None:
    alone = _experiment(1, mesh={"data": 1})
    state = alone.program.init()
    losses = []
    for step in range(4):
        state, values = alone.program.train(state, alone.loader.batch(step))
        losses.append(float(values[0]))
    hybrid = _experiment(devices, **{"strategy": _HYBRID, **sections})
    assert hybrid.rows is not None
    tables = Tables(RowSgd(), 2, form=hybrid.rows.form, seed=hybrid.rows.seed)
    with tables.clients(1) as (client,):
        hybrid.rows.fetch = client.pull
        program = TableProgram(hybrid.program, hybrid.rows, client, None, 1)
        own, found = hybrid.program.init(), []
        for step in range(4):
            own, values = program.train(own, hybrid.loader.batch(step))
            found.append(float(values[0]))
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        assert _heldout(hybrid, own) == pytest.approx(_heldout(alone, state), rel=1e-5)
        table = np.asarray(state.params["tables"]["rows"])
        ids = np.repeat(np.arange(64, dtype=np.int32)[:, None], 4, axis=1)
        rows = touched_rows(hybrid.rows.form, ids).T.reshape(-1)
        np.testing.assert_allclose(client.pull(rows), table[: len(rows)], rtol=1e-5, atol=1e-6)
    dense = {k: v for k, v in state.params.items() if k != "tables"}
    others = {k: v for k, v in own.params.items() if k != "tables"}
    for one, other in zip(jax.tree.leaves(dense), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-6)
    counts = program.counts
    assert counts["ids"] == 4 * 64 * 4
    formula = counts["unique_ids"] * (2 * rows.itemsize + 2 * 4 * 8)
    assert formula <= counts["bytes"] <= 1.02 * formula


class _AtOnce:
    """A client of a single store, which reads the rows of a pull when the pull begins."""

    sent_bytes = received_bytes = 0

    def __init__(self, store: RowStore) -> None:
        self.store, self.found = store, np.zeros(0)

    def begin(self, rows: np.ndarray) -> None:
        self.found = self.store.read(rows)

    def take(self) -> np.ndarray:
        return self.found

    def push(self, rows: np.ndarray, grads: np.ndarray, rate: float) -> None:
        self.store.update(rows, grads, rate)


@pytest.mark.full
def test_rows_of_the_next_batch_are_pulled_before_the_push_of_this_one() -> None:
    """Each step but the first lacks the push before it; an evaluation in between has all pushes."""
    hybrid = _experiment(1, strategy=_HYBRID, mesh={"data": 1})
    rows = hybrid.rows
    assert rows is not None
    model = SSP(bound=2, reads="ahead")
    tables = Tables(RowSgd(), 2, form=rows.form, seed=rows.seed, model=model)
    own = RowStore(rows.form, RowSgd(), rows.seed)
    every = np.arange(rows.form.rows, dtype=np.uint32)

    def train(client: Any) -> list[Any]:
        found = []
        loader: Any = LookAheadLoader(hybrid.loader)
        program = TableProgram(hybrid.program, rows, client, None, 1, lambda: loader.following)
        state = hybrid.program.init()
        with loader.batches() as batches:
            for _ in range(4):
                state, values = program.train(state, next(batches))
                if isinstance(client, TableClient):
                    client.wait_until(lambda: len(client._links[0].payloads) <= 1, "a push")
                    client.pull(every)
                found.append(np.asarray(values))
        return found

    with tables.clients(1) as (client,):
        found = train(client)
        np.testing.assert_array_equal(found, train(_AtOnce(own)))
        client.take()
        np.testing.assert_array_equal(client.pull(every), own.read(every))
    for server in tables.servers:
        assert server.shard.staleness == {0: 1, 1: 3}


def test_gradients_of_rows_cost_no_second_pass() -> None:
    program = _experiment(8, mesh={"data": 8}, strategy=_HYBRID).program

    def flops(function: Any) -> float:
        compiled = function.lower(program.state_shapes, program.batch).compile()
        return compiled.cost_analysis()["flops"]

    assert flops(program.train_with("table_rows")) <= 1.1 * flops(program.train)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"type": "mlp", "hidden": [8]}, "data": {"type": "images", "source": "digits"}},
         "model.type mlp with strategy.type hybrid: .* has no tables"),
        ({"data": {"type": "images", "source": "digits"}}, "dlrm needs ids of categorical fields"),
        ({"train": {"steps": 4, "batch_size": 64, "microbatches": 2}}, "train.microbatches 2"),
        ({"optim": {**_SECTIONS["optim"], "clip_norm": 1.0}}, "optim.clip_norm"),
        ({"strategy": {**_HYBRID, "consistency": {"type": "ssp", "reads": "lazy"}}}, "each_clock"),
        ({"strategy": {**_HYBRID, "consistency": {"type": "bsp", "backups": 1}}}, "backups"),
        ({"strategy": {**_HYBRID, "optimizer": {"type": "lamb"}}}, "lazy_adam"),
        ({"strategy": {**_HYBRID, "servers": 1, "replicas": 2}}, "replicas 2 exceeds servers 1"),
        ({"strategy": {**_HYBRID, "replicas": 2, "processes": {"port": 4000}}}, "further ports"),
        ({"checkpoint": {"local": {"directory": "ssd"}}}, "snapshots hold .* not the tables"),
        ({"sharding": {"rules": {"rows": "data"}}}, "no parameter has this dim"),
        ({"strategy": {**_HYBRID, "most_rows": 40}}, "most_rows 40 is too small for 2 servers"),
        ({"strategy": {**_HYBRID, "most_rows": 96, "ranges": 4}}, "96 is too small for 4 ranges"),
        ({"strategy": {**_HYBRID, "ranges": 1}}, "ranges 1 is less than servers 2"),
        ({"strategy": {**_HYBRID, "ranges": 4, "processes": {"port": 4000}}}, "a separate port"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_tables_on_servers_is_refused(
    sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _experiment(1, **{"mesh": {"data": 1}, "strategy": _HYBRID, **sections})
