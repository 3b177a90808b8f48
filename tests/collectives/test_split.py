"""Shards that travel together: the same tensors as one by one, in fewer messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded import label, mapped, mesh_of

from jaxdist.collectives import (
    Auto,
    CollectiveError,
    Halving,
    Ring,
    Tree,
    Xla,
    gather_leaves,
    reduce_scatter,
    reduce_tree,
    scatter_leaves,
)
from jaxdist.collectives.algorithms.auto import LinkConfig
from jaxdist.collectives.bucket import sends_apart
from jaxdist.hlo import ledger

DEVICES = 8
ALGORITHMS = [Ring(), Ring(bucket_bytes=None), Tree(bucket_bytes=2048), Halving(), Xla()]
ALGORITHMS += [Xla(bucket_bytes=2**20), Auto(), Auto(bucket_bytes=2**20)]
SWITCH = LinkConfig(latency_seconds=1e-3, bytes_per_second=1e9)
SHAPES = [(6, 16, 3), (24,), (13, 2), (3, 9), (4, 13), (9, 2)]
"""Of tensors of which 8 devices hold parts; 13 and 9 do not divide, and are filled up."""
DIMS = [1, 0, 0, 1, 1, 0]
LENGTHS = [None, None, 13, 9, 13, 9]
DTYPES = ["float32"] * 4 + ["float16", "int32"]


def tensors():
    rng = np.random.default_rng(0)
    return [
        rng.integers(-9, 9, (DEVICES, *shape)).astype(dtype)
        for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]


def scattered(xs, algorithm):
    return scatter_leaves(xs, DIMS, "data", algorithm=algorithm)


def gathered(shards, algorithm):
    return gather_leaves(shards, DIMS, "data", lengths=LENGTHS, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=label)
@pytest.mark.every(3)
def test_shards_are_those_of_each_tensor_by_itself(algorithm):
    def one_by_one(xs):
        return [reduce_scatter(x, "data", dim=dim) for x, dim in zip(xs, DIMS, strict=True)]

    found = mapped(lambda xs: scattered(xs, algorithm), {"data": DEVICES})(tensors())
    expected = mapped(one_by_one, {"data": DEVICES})(tensors())
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=label)
@pytest.mark.every(3)
def test_what_is_summed_into_shards_is_gathered_whole(algorithm):
    def there_and_back(xs):
        return gathered(scattered(xs, algorithm), algorithm)

    found = mapped(there_and_back, {"data": DEVICES})(tensors())
    for ours, x in zip(found, tensors(), strict=True):
        np.testing.assert_array_equal(ours, np.broadcast_to(x.sum(0, dtype=x.dtype), x.shape))


def test_without_lengths_the_zeros_stay():
    def gather(x):
        return gather_leaves([x, x], [0, 0], "data", algorithm=Ring())[1]

    found = mapped(gather, {"data": DEVICES})(np.arange(DEVICES, dtype="float32")[:, None])
    np.testing.assert_array_equal(found, np.tile(np.arange(DEVICES), (DEVICES, 1)))


def messages(function, algorithm, given, kind="collective-permute"):
    compiled = mapped(lambda xs: function(xs, algorithm), {"data": DEVICES}).lower(given).compile()
    found = ledger(compiled, mesh_of({"data": DEVICES}))
    return sum(c.times_high for c in found.collectives if c.kind == kind)


@pytest.mark.full
def test_a_bucket_is_one_message_a_step():
    """Three dtypes are three buckets; alone each of six tensors takes as many steps."""
    steps = DEVICES - 1
    shards = [np.zeros((DEVICES, 2), dtype) for dtype in DTYPES]

    def gather(xs, algorithm):
        return gather_leaves(xs, [0] * 6, "data", algorithm=algorithm)

    for function, given in ((scattered, tensors()), (gather, shards)):
        assert messages(function, Ring(), given) == 3 * steps
        assert messages(function, Ring(bucket_bytes=None), given) == 6 * steps


@pytest.mark.full
def test_the_compiler_merges_its_own_but_for_gloo(monkeypatch):
    def lowered(algorithm):
        function = mapped(lambda xs: scattered(xs, algorithm), {"data": DEVICES})
        return function.lower(tensors()).as_text().count("reduce_scatter")

    assert not sends_apart()
    alone = lowered(Xla())
    assert lowered(Auto(fast=SWITCH, xla=True, bucket_bytes=None)) == alone
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert sends_apart()
    jax.clear_caches()
    assert lowered(Xla()) < alone


def test_it_can_be_differentiated():
    """What is gathered and weighed: each device's shard has the weight of all of them."""

    def gradient(xs):
        def loss(xs):
            one, two = gather_leaves(xs, [0, 1], "data", algorithm=Ring())
            return 2 * one.sum() + 3 * two.sum()

        return jax.grad(loss)(xs)

    xs = [np.ones((DEVICES, 2), "float32"), np.ones((DEVICES, 3, 1), "float32")]
    one, two = mapped(gradient, {"data": DEVICES})(xs)
    np.testing.assert_array_equal(one, np.full((DEVICES, 2), 16.0))
    np.testing.assert_array_equal(two, np.full((DEVICES, 3, 1), 24.0))


@pytest.mark.parametrize("function", [gather_leaves, scatter_leaves])
def test_outside_of_shard_map_it_says_so(function):
    with pytest.raises(
        CollectiveError, match=f"{function.__name__} over 'data' was called outside"
    ):
        function([jnp.ones(2)], [0], "data", algorithm=Ring())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dims": [0]}, "1 dims were passed for 2 tensors"),
        ({"dims": [0, 2]}, "dim 2 is out of range"),
        ({"lengths": [4]}, "1 lengths were passed for 2 tensors"),
        ({"lengths": [None, 99]}, "size 99 is out of range"),
        ({"algorithm": "ring"}, "algorithm"),
        ({"shards": [{"a": 1}, 2]}, "expects a single array"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_input_is_told(given, said):
    def gather(x):
        found = {"shards": [x, x], "dims": [0, 0], "lengths": None, "algorithm": Ring(), **given}
        return gather_leaves(found.pop("shards"), found.pop("dims"), "data", **found)

    with pytest.raises(CollectiveError, match=said):
        mapped(gather, {"data": DEVICES})(np.zeros((DEVICES, 2)))


def test_dims_may_be_counted_from_the_end():
    def there_and_back(x):
        shards = scatter_leaves([x, x], [-1, -2], "data", algorithm=Ring())
        return gather_leaves(shards, [-1, -2], "data", algorithm=Ring())

    x = np.arange(DEVICES * 8 * 16, dtype="float32").reshape(DEVICES, 8, 16)
    for found in mapped(there_and_back, {"data": DEVICES})(x):
        np.testing.assert_array_equal(found[0], x.sum(0))


def test_nothing_is_nothing():
    def function(x):
        assert gather_leaves([], [], "data", algorithm=Ring()) == []
        return x

    mapped(function, {"data": DEVICES})(np.zeros(DEVICES))


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=label)
def test_empty_tensors_travel_with_the_others(algorithm):
    shapes = [(8, 0), (0, 3), (16, 2), (8, 0, 2), (0,)]
    dims = [0, 0, 0, 2, 0]
    xs = [np.ones((DEVICES, *shape), np.float32) for shape in shapes]

    def every(xs):
        whole = gather_leaves(xs, dims, "data", algorithm=algorithm)
        parts = scatter_leaves(xs, dims, "data", algorithm=algorithm)
        return whole, parts, reduce_tree(xs, "data", algorithm=algorithm)

    whole, parts, reduced = mapped(every, {"data": DEVICES})(xs)
    assert [x.shape[1:] for x in whole] == [(64, 0), (0, 3), (128, 2), (8, 0, 16), (0,)]
    assert [x.shape[1:] for x in parts] == [(1, 0), (0, 3), (2, 2), (8, 0, 1), (0,)]
    assert [x.shape[1:] for x in reduced] == shapes
    np.testing.assert_array_equal(parts[2], 8.0)
    np.testing.assert_array_equal(reduced[2], 8.0)


@pytest.mark.parametrize("algorithm", [Ring(), Xla(bucket_bytes=2**20), Auto()], ids=label)
def test_nothing_but_empty_tensors(algorithm):
    xs = [np.ones((DEVICES, 0, 3), np.float32), np.ones((DEVICES, 4, 0), np.float32)]

    def every(xs):
        return (
            gather_leaves(xs, [0, 0], "data", algorithm=algorithm),
            scatter_leaves(xs, [0, 1], "data", algorithm=algorithm),
            reduce_tree(xs, "data", algorithm=algorithm),
        )

    found = mapped(every, {"data": DEVICES})(xs)
    shapes = [[x.shape[1:] for x in part] for part in found]
    assert shapes == [[(0, 3), (32, 0)], [(0, 3), (4, 0)], [(0, 3), (4, 0)]]
