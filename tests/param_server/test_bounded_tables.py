"""A bounded number of table rows: one rule of eviction on any servers, in files and in copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxdist.config import Document, validate
from jaxdist.data.recommend.criteo import IDS, CriteoConfig
from jaxdist.data.values import Allowed
from jaxdist.errors import ConfigError, DataError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.models.recommend.rows import RowForm
from jaxdist.param_server.consistency.contract import Clocks
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.tables.batch import TableRows
from jaxdist.tables.bounded import BoundedStore, open_store
from jaxdist.tables.keys import KEY, WAYS, initial_rows, sets_of, touched_rows, unique_rows
from jaxdist.tables.messages import pack
from jaxdist.tables.optimizer import RowAdagrad
from jaxdist.tables.server import TableServer, TableShard
from jaxdist.tables.store import RowStore
from jaxdist.tables.training.files import TableWriter, about_tables, form_of, read_tables

FORM = RowForm({"user": 0, "item": 100}, 4, 0.1, most=4 * WAYS)
SEED, OPTIMIZER = 7, RowAdagrad()


def keys(numbers: Any) -> np.ndarray:
    """The keys of numbers: odd ones are users with ids above 2**63, even ones are items."""
    numbers = np.sort(np.asarray(numbers, np.uint64))
    found = np.empty(len(numbers), KEY)
    found["field"] = 1 - numbers % 2
    found["id"] = np.where(numbers % 2, numbers + np.uint64(2**63), numbers // 2)
    return unique_rows(found)[0]


EVERY = keys(np.arange(190))


class Updates:
    """Updates of random rows; some of them have more rows of a set than the set can keep."""

    def __init__(self, steps: int) -> None:
        random = np.random.default_rng(0)
        self.steps = []
        for step in range(steps):
            count = 150 if step % 7 == 3 else 20
            rows = keys(random.choice(190, count, replace=False))
            self.steps.append((rows, random.normal(size=(count, 4)).astype(np.float32)))


def plain(steps: Any) -> np.ndarray:
    """The values of all rows by the rule of eviction, row after row."""
    sets: dict[int, dict[tuple[int, int], Any]] = {}
    for version, (rows, grads) in enumerate(steps, 1):
        for row, grad in zip(rows, grads, strict=True):
            group = sets.setdefault(int(sets_of(row[None], FORM.most)[0]), {})
            begun = np.zeros((1, 5), np.float32)
            begun[:, :4] = initial_rows(FORM, np.array(SEED, np.uint32), row[None])
            values = group.get(row.item(), (0, begun))[1].copy()
            OPTIMIZER.update(values, grad[None], 0.1)
            group[row.item()] = version, values
        for at, group in sets.items():
            newest = sorted(group.items(), key=lambda one: (-one[1][0], one[0]))
            sets[at] = dict(newest[:WAYS])
    found = initial_rows(FORM, np.array(SEED, np.uint32), EVERY)
    for at, row in enumerate(EVERY):
        kept = sets.get(int(sets_of(row[None], FORM.most)[0]), {}).get(row.item())
        if kept is not None:
            found[at] = kept[1][0, :4]
    return found


def servers(count: int) -> list[RowStore]:
    return [open_store(FORM, OPTIMIZER, SEED, server=at, servers=count) for at in range(count)]


def owned(store: RowStore, rows: np.ndarray) -> np.ndarray:
    return sets_of(rows, FORM.most) % store._servers == store.server


def whole(stores: list[RowStore]) -> np.ndarray:
    found = np.empty((len(EVERY), 4), np.float32)
    for store in stores:
        mine = owned(store, EVERY)
        found[mine] = store.read(EVERY[mine])
    return found


def apply(stores: list[RowStore], rows: np.ndarray, grads: np.ndarray) -> None:
    for store in stores:
        mine = owned(store, rows)
        store.update(rows[mine], grads[mine], 0.1)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_the_same_rows_are_kept_on_any_number_of_servers(count: int) -> None:
    steps, stores = Updates(24).steps, servers(count)
    for done, (rows, grads) in enumerate(steps, 1):
        apply(stores, rows, grads)
        assert sum(store.touched for store in stores) <= FORM.most
        if done % 8 == 0:
            np.testing.assert_array_equal(whole(stores), plain(steps[:done]))
    assert sum(store.evicted for store in stores) > 100


@pytest.mark.parametrize("after", [1, 2, 4])
def test_files_and_copies_of_bounded_tables_go_on_like_the_first_servers(
    after: int, tmp_path: Path
) -> None:
    """A row that was evicted after an incremental checkpoint's base does not come back."""
    steps, stores = Updates(24).steps, servers(3)
    layout: Any = None
    about = about_tables(TableRows(FORM, layout, SEED), OPTIMIZER)
    assert form_of(about, FORM.most) == FORM
    made = [TableServer(TableShard(s, 512), BSP(), RangeState(Clocks(1))) for s in stores]
    writers = [
        TableWriter(tmp_path, at, {**about, "servers": 3}, server.kept)
        for at, server in enumerate(made)
    ]
    for step, (rows, grads) in enumerate(steps[:20], 1):
        apply(stores, rows, grads)
        if step % 2 == 0:
            for writer in writers:
                writer.write(step)
    texts = [path.read_text() for path in tmp_path.glob("tables/*/*20/metadata.json")]
    assert any('"base": {' in text for text in texts), "some have only the rows that changed"
    again = servers(after)
    for found, values in read_tables(tmp_path, 20, about):
        for store in again:
            store.load(found, values)
    copies = servers(3)
    for copy, store in zip(copies, stores, strict=True):
        raw = [np.frombuffer(one.tobytes(), np.uint8) for one in store.kept()]
        TableShard(copy, 512).restore(raw)
    for rows, grads in steps[20:]:
        apply(stores, rows, grads)
        apply(again, rows, grads)
        for copy in copies:
            mine = owned(copy, rows)
            change = pack(np.array([0.1], np.float32), rows[mine], grads[mine])
            TableShard(copy, 512).move(change, 1.0)
    for found in (again, copies):
        np.testing.assert_array_equal(whole(found), plain(steps))
    for server in made:
        server.close()


def test_rows_of_a_given_table_begin_as_on_a_mesh() -> None:
    seed = np.array(SEED, np.uint32)
    form = RowForm({"user": 50, "item": 100}, 4, 0.1)
    ids = np.array([[3, 4], [49, 99]], np.int32)
    rows = touched_rows(RowForm({"user": 50, "item": 100}, 4, 0.1, most=64), ids).reshape(-1)
    found = initial_rows(RowForm({"user": 50, "item": 100}, 4, 0.1, most=64), seed, rows)
    np.testing.assert_array_equal(found, form.initial(seed, touched_rows(form, ids).reshape(-1)))
    free = initial_rows(FORM, seed, EVERY)
    assert len(np.unique(free, axis=0)) == len(EVERY)
    assert np.abs(free).max() <= 0.1
    assert abs(free.mean()) < 0.02


def test_rows_that_no_table_has_are_refused() -> None:
    store = open_store(FORM, OPTIMIZER, SEED, server=0, servers=2)
    assert isinstance(store, BoundedStore)
    wrong = np.array([(2, 5)], KEY), np.array([(1, 100)], KEY)
    assert store.problem(wrong[0]) == (
        "field 2 does not exist: the tables are user, item: correct the data"
    )
    assert store.problem(wrong[1]) == (
        "row 100 of item does not exist: the table has 100 rows: correct the ids in the data"
    )
    assert "a different server" in str(store.problem(EVERY))
    assert store.problem(EVERY[owned(store, EVERY)]) is None


def _criteo(path: Path) -> dict[str, Any]:
    rows = []
    for at in range(64):
        ids = [f"{(at * 31 + column) % 11 + 2**63:x}" for column in range(IDS)]
        rows.append("\t".join([str(at % 2), *["3"] * 13, *ids]))
    path.write_text("\n".join(rows) + "\n")
    return {
        "model": {"type": "dlrm", "width": 4, "bottom": [4], "top": [4]},
        "data": {"type": "criteo", "train": str(path), "hash_size": None},
        "optim": {"type": "sgd", "learning_rate": 0.1},
        "train": {"steps": 2, "batch_size": 16},
        "mesh": {"data": 2},
        "strategy": {"type": "hybrid", "most_rows": 4096},
    }


def test_ids_of_64_bits_are_kept(tmp_path: Path) -> None:
    sections = _criteo(tmp_path / "clicks")
    document = Document(sections)
    found = build(validate(document, ExperimentConfig), document, devices=jax.devices()[:2])
    assert found.rows is not None
    store = open_store(found.rows.form, OPTIMIZER, SEED)
    found.rows.fetch = store.read
    batch, touched = found.rows.filled(found.loader.batch(0))
    assert touched.looked_up == 16 * IDS
    assert {int(one) for one in touched.rows["id"]} <= {2**63 + at for at in range(11)}
    _, values = found.program.train(found.program.init(), batch)
    assert np.isfinite(np.asarray(values)).all()
    source = CriteoConfig.model_validate(sections["data"]).build()
    ids = source.train[0]["ids"][None]
    allowed = Allowed(tables={**dict(source.fields or {}), "C1": 5})
    with pytest.raises(DataError, match=r"'ids'\[0\] of example 0 .* is 9223372036854775808, and"):
        allowed.check({"ids": ids}, np.array([0]))


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"type": "hybrid"}, "the tables of C1, C2, C3 have a row for each 64-bit id"),
        ({"type": "synchronous"}, "on a mesh needs tables of a given size"),
    ],
)
def test_ids_of_64_bits_without_a_bound_are_refused(
    strategy: dict[str, Any], message: str, tmp_path: Path
) -> None:
    document = Document({**_criteo(tmp_path / "clicks"), "strategy": strategy})
    with pytest.raises(ConfigError, match=message):
        build(validate(document, ExperimentConfig), document, devices=jax.devices()[:2])
