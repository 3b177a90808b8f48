from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist.data.loader import Loader
from jaxdist.data.source import ArraySource, Example
from jaxdist.errors import DataError


class Listed:
    """Examples one by one, without the fast path; remembers what was read."""

    def __init__(self, length: int, **extra: Any):
        self.read: list[int] = []
        self._length, self._extra = length, extra

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self._length:
            raise IndexError(index)
        self.read.append(index)
        return {"x": np.full(3, index, np.float32), "id": np.array(index, np.int32), **self._extra}


def _arrays(length: int) -> ArraySource:
    ids = np.arange(length, dtype=np.int32)
    return ArraySource(x=np.repeat(ids[:, None], 3, 1).astype(np.float32), id=ids)


def _on_one_device(name: str, shape: tuple[int, ...]) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _over(*spec: str | None) -> Any:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))
    return lambda name, shape: NamedSharding(mesh, PartitionSpec(*spec[: len(shape)]))


def _loader(source: Any, batch_size: int, sharding: Any = _on_one_device, **options: Any) -> Loader:
    return Loader(source, batch_size=batch_size, sharding=sharding, **options)


def _ids(batches: Iterator, count: int) -> list[list[int]]:
    return [np.asarray(batch["id"]).tolist() for batch in itertools.islice(batches, count)]


def test_a_batch_holds_the_sources_names_and_evaluation_adds_a_weight() -> None:
    loader = _loader(_arrays(10), 4)
    with loader.batches() as batches, loader.evaluation_batches() as evaluation:
        batch, heldout = next(batches), next(evaluation)
    shapes = {"x": ((4, 3), np.float32), "id": ((4,), np.int32)}
    assert {name: (a.shape, a.dtype) for name, a in batch.items()} == shapes
    assert {name: (s.shape, s.dtype) for name, s in loader.batch_shapes.items()} == shapes
    np.testing.assert_array_equal(batch["x"][:, 0], batch["id"])
    assert {name: (a.shape, a.dtype) for name, a in heldout.items()} == {
        **shapes,
        "weight": ((4,), np.float32),
    }
    assert np.asarray(heldout["weight"]).tolist() == [1, 1, 1, 1]


def test_both_kinds_of_source_give_the_same_batches() -> None:
    with _loader(_arrays(10), 4).batches() as fast, _loader(Listed(10), 4).batches() as slow:
        assert _ids(fast, 7) == _ids(slow, 7)


def test_each_epoch_visits_each_example_once_in_an_order_of_its_own() -> None:
    with _loader(_arrays(12), 4, seed=5).batches() as batches:
        ids = np.array(_ids(batches, 9)).reshape(3, 12)
    assert [sorted(epoch) for epoch in ids.tolist()] == [list(range(12))] * 3
    assert len({tuple(epoch) for epoch in ids.tolist()}) == 3


def test_without_shuffle_the_order_is_the_sources() -> None:
    with _loader(_arrays(5), 4, shuffle=False).batches() as batches:
        assert _ids(batches, 3) == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]


def test_parts_of_a_batch_are_its_rows() -> None:
    """Shares drawn at random, at any step, one batch or a stream of them."""
    rng = np.random.default_rng(2)
    loader = _loader(_arrays(50), 12, seed=4).resized(12, start_example=7)
    for _ in range(5):
        cuts = sorted(rng.choice(np.arange(1, 12), 2, replace=False))
        starts, step = [0, *map(int, cuts), 12], int(rng.integers(9))
        parts = [loader.part(a, b - a) for a, b in itertools.pairwise(starts)]
        whole, found = loader.batch(step), [part.batch(step) for part in parts]
        for name, values in whole.items():
            np.testing.assert_array_equal(np.concatenate([one[name] for one in found]), values)
            assert parts[0].batch_shapes[name].shape[0] == starts[1]
        with parts[1].batches(step) as stream:
            np.testing.assert_array_equal(next(stream)["id"], found[1]["id"])
    assert loader.batch_shapes["id"].shape == (12,)


def test_the_seed_gives_the_order() -> None:
    orders = [_loader(_arrays(50), 50, seed=seed).indices(0).tolist() for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


@settings(max_examples=10)
@given(start=st.integers(0, 2**40), batch_size=st.integers(1, 9), shuffle=st.booleans())
def test_a_resume_needs_only_the_step(start: int, batch_size: int, shuffle: bool) -> None:
    loader = _loader(_arrays(7), batch_size, shuffle=shuffle)
    with loader.batches(start) as whole:
        uninterrupted = _ids(whole, 5)
    with loader.batches(start + 2) as rest:
        assert _ids(rest, 3) == uninterrupted[2:]


def test_a_batch_larger_than_the_source_goes_round() -> None:
    with _loader(_arrays(3), 7, shuffle=False).batches() as batches:
        assert _ids(batches, 2) == [[0, 1, 2, 0, 1, 2, 0], [1, 2, 0, 1, 2, 0, 1]]


@pytest.mark.parametrize("spec", [("data",), (("data", "tensor"),), (None,), ()])
def test_the_layout_does_not_change_the_batch(spec: tuple) -> None:
    sharding = _over(*spec)
    with (
        _loader(_arrays(40), 16, sharding=sharding).batches() as laid_out,
        _loader(_arrays(40), 16).batches() as plain,
    ):
        for ours, reference in itertools.islice(zip(laid_out, plain, strict=True), 4):
            for name, array in ours.items():
                assert array.sharding == sharding(name, array.shape)
                np.testing.assert_array_equal(np.asarray(array), np.asarray(reference[name]))


def test_evaluation_reads_everything_once_and_pads_with_weight_zero() -> None:
    with _loader(_arrays(10), 4).evaluation_batches() as batches:
        rows = list(batches)
    weights = np.concatenate([np.asarray(row["weight"]) for row in rows])
    ids = np.concatenate([np.asarray(row["id"]) for row in rows])
    assert weights.tolist() == [1] * 10 + [0] * 2
    assert ids[weights > 0].tolist() == list(range(10))
    assert all(row["x"].shape == (4, 3) for row in rows)


@pytest.mark.parametrize(("limit", "count"), [(None, 3), (0, 0), (2, 2), (9, 3)])
def test_evaluation_stops_at_its_limit(limit: int | None, count: int) -> None:
    with _loader(_arrays(10), 4).evaluation_batches(limit) as batches:
        assert len(list(batches)) == count


def test_only_the_rows_of_this_process_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Listed(16)
    loader = _loader(source, 16, shuffle=False, sharding=_over("data"))
    placement = loader._placement
    monkeypatch.setattr(placement, "rows", np.arange(4, 8))
    monkeypatch.setattr(placement, "place", lambda local: local)
    source.read.clear()
    with loader.evaluation_batches() as batches:
        batch = next(batches)
    assert batch["id"].tolist() == [4, 5, 6, 7]
    assert set(source.read) - {0} == {4, 5, 6, 7}  # example 0 is what shapes are held against


def test_a_weight_of_the_sources_own_is_kept() -> None:
    source = Listed(3, weight=0.25)
    loader = _loader(source, 2)
    with loader.evaluation_batches() as batches:
        weights = [np.asarray(batch["weight"]).tolist() for batch in batches]
    assert weights == [[0.25, 0.25], [0.25, 0]]
    with loader.batches() as batches:
        assert np.asarray(next(batches)["weight"]).tolist() == [0.25, 0.25]


def test_closing_stops_the_threads() -> None:
    before = set(threading.enumerate())

    def readers() -> set[threading.Thread]:
        return set(threading.enumerate()) - before

    batches = _loader(_arrays(10), 4).batches()
    next(batches)
    assert readers()
    batches.close()
    batches.close()
    deadline = time.monotonic() + 20
    while readers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not readers()


def test_batches_wait_ahead_of_the_consumer_and_no_further() -> None:
    source = Listed(1000)
    with _loader(source, 1, shuffle=False, prefetch=3, threads=1).batches() as batches:
        next(batches)
        deadline = time.monotonic() + 20
        while max(source.read) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert max(source.read) == 3


def test_an_error_of_the_source_reaches_the_consumer() -> None:
    class Failing(Listed):
        def __getitem__(self, index: int) -> Example:
            if index == 5:
                raise OSError("disk gone")
            return super().__getitem__(index)

    with (
        _loader(Failing(10), 2).evaluation_batches() as batches,
        pytest.raises(DataError, match=r"example 5 raised OSError: disk gone \(.*test_loader\.py"),
    ):
        list(batches)


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_who_asks_after_the_end_is_told_again(prefetch: int) -> None:
    with _loader(_arrays(5), 2, prefetch=prefetch).evaluation_batches() as batches:
        assert len(list(batches)) == 3
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(batches)


def test_an_empty_source() -> None:
    with pytest.raises(DataError, match="empty: it has 0 examples"):
        _loader(_arrays(0), 4)


@pytest.mark.parametrize("batch_size", [0, -4])
def test_a_batch_without_examples(batch_size: int) -> None:
    with pytest.raises(DataError, match=f"batch_size is {batch_size}"):
        _loader(_arrays(20), batch_size)


def test_a_weight_is_one_number() -> None:
    with pytest.raises(DataError, match=r"'weight' of example 0 has shape \(2,\)"):
        _loader(Listed(4, weight=np.ones(2)), 2)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_start_continues_the_order_in_batches_of_another_size(shuffle: bool) -> None:
    source = _arrays(10)
    whole = _loader(source, 1, shuffle=shuffle)
    in_order = [int(whole.indices(i)[0]) for i in range(40)]
    later = whole.resized(6, start_example=7)
    with later.batches(1) as batches:
        assert _ids(batches, 2) == [in_order[13:19], in_order[19:25]]
    assert later.indices(0).tolist() == in_order[7:13]


def test_the_structs_lie_as_the_batches_do() -> None:
    loader = _loader(_arrays(10), 4)
    with loader.batches() as batches:
        batch = next(batches)
    for name, struct in loader.batch_shapes.items():
        assert struct.sharding == batch[name].sharding


@pytest.mark.full
def test_batches_larger_than_the_machine_are_refused_before_one_is_read() -> None:
    examples = 2**20
    source = ArraySource(x=np.broadcast_to(np.uint8(0), (examples, 10**7)))
    loader = _loader(source, examples)
    with pytest.raises(DataError, match=r"3 batches of 1,048,576 examples of 10.0 MB need 31,457"):
        loader.batches()
