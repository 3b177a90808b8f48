from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded import label, mapped, mesh_of

from jaxdist.collectives import CollectiveError, Halving, Hierarchical, Ring, Tree, Xla
from jaxdist.collectives.algorithms.auto import Auto, LinkConfig
from jaxdist.collectives.bucket import (
    BUCKET_BYTES,
    fusion_bytes,
    pack,
    plan_buckets,
    reduce_tree,
    unpack,
)
from jaxdist.hlo import ledger

SWITCH = LinkConfig(latency_seconds=1e-3, bytes_per_second=1e9)
OURS = Auto(xla=False, fast=SWITCH)


def leaves_of(*sizes, dtype="float32"):
    return [np.zeros(size, dtype) for size in sizes]


def test_buckets_are_filled_from_the_last_leaf_to_the_first():
    assert plan_buckets(leaves_of(1, 1, 1, 1, 1), 8) == [[4, 3], [2, 1], [0]]


def test_an_order_goes_before_the_trees():
    assert plan_buckets(leaves_of(1, 1, 1), 8, [1, 0, 2]) == [[1, 0], [2]]


def test_a_leaf_larger_than_a_bucket_has_one_and_leaves_the_open_one_open():
    assert plan_buckets(leaves_of(1, 9, 1), 8) == [[1], [2, 0]]
    assert plan_buckets(leaves_of(2, 9, 2), 16) == [[1], [2, 0]]


def test_a_leaf_of_just_the_size_of_a_bucket_fits():
    assert plan_buckets(leaves_of(2, 2), 8) == [[1], [0]]
    assert plan_buckets(leaves_of(1, 1), 8) == [[1, 0]]


def test_dtypes_do_not_mix():
    leaves = [*leaves_of(1, 1), *leaves_of(1, 1, dtype="int8")]
    order = [0, 2, 1, 3]
    assert plan_buckets(leaves, 8, order) == [[0, 1], [2, 3]]


def test_no_fusion_is_a_bucket_for_each_leaf_in_order():
    assert plan_buckets(leaves_of(1, 1, 1), None) == [[2], [1], [0]]
    assert plan_buckets([], 8) == plan_buckets([], None) == []


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["float32", "int8"]))),
    st.integers(1, 40),
    st.randoms(),
)
def test_every_leaf_once_one_dtype_a_bucket_never_overfull(leaves, bucket_bytes, random):
    arrays = [np.zeros(size, dtype) for size, dtype in leaves]
    order = list(range(len(arrays)))
    random.shuffle(order)
    buckets = plan_buckets(arrays, bucket_bytes, order)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(arrays)))
    for bucket in buckets:
        assert len({arrays[index].dtype for index in bucket}) == 1
        assert len(bucket) == 1 or sum(arrays[i].nbytes for i in bucket) <= bucket_bytes
        assert [order.index(index) for index in bucket] == sorted(order.index(i) for i in bucket)


def test_packing_is_undone():
    arrays = [jnp.arange(6.0).reshape(2, 3), jnp.float32(7), jnp.zeros((0, 4)), jnp.ones(1)]
    flat = pack(arrays)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 1]
    for ours, array in zip(unpack(flat, arrays), arrays, strict=True):
        assert ours.shape == array.shape
        np.testing.assert_array_equal(ours, array)


def test_auto_is_off_where_xla_merges_its_own():
    assert fusion_bytes(Xla()) is None
    assert fusion_bytes(Ring()) == fusion_bytes(Hierarchical()) == BUCKET_BYTES == 32 * 2**20
    assert fusion_bytes(Ring(bucket_bytes=None)) is None
    assert fusion_bytes(Xla(bucket_bytes=8)) == 8


TREE = {
    "a": np.arange(24, dtype=np.float32).reshape(8, 3),
    "b": [np.arange(8, dtype=np.int32), np.ones((8, 2, 2), np.float32)],
    "c": (np.arange(8, dtype=np.float32), None),
    "d": np.arange(40, dtype=np.float16).reshape(8, 5),
    "e": np.zeros((8, 0), np.float32),
}


@pytest.mark.parametrize("size", [None, "auto", 1, 12, 16, 1024])
@pytest.mark.parametrize("algorithm", [Ring, Tree, Xla, Halving], ids=lambda a: a.__name__)
@pytest.mark.every(3)
def test_a_tree_comes_back_summed_whatever_the_bucket(algorithm, size):
    chosen = algorithm(bucket_bytes=size)
    reduced = mapped(lambda tree: reduce_tree(tree, "data", algorithm=chosen), {"data": 8})(TREE)
    assert jax.tree.structure(reduced) == jax.tree.structure(TREE)

    def check(ours, whole):
        assert ours.dtype == whole.dtype
        expected = np.broadcast_to(whole.sum(0, dtype=whole.dtype), whole.shape)
        np.testing.assert_array_equal(ours, expected)

    jax.tree.map(check, reduced, TREE)


@pytest.mark.parametrize("algorithm", [Ring(), Hierarchical(), OURS, Auto()], ids=label)
def test_the_mean_over_two_axes(algorithm):
    tree = {"a": np.arange(8, dtype=np.float32)[:, None], "b": np.ones((8, 3), np.float32)}
    axes = ("data_dcn", "data_ici")

    def mean(tree):
        return reduce_tree(tree, axes, op="mean", algorithm=algorithm)

    reduced = mapped(mean, {"data_dcn": 2, "data_ici": 4})(tree)
    np.testing.assert_array_equal(reduced["a"], np.full((8, 1), 3.5))
    np.testing.assert_array_equal(reduced["b"], np.ones((8, 3)))


def count(algorithm, tree, kind="collective-permute"):
    function = mapped(lambda t: reduce_tree(t, "data", algorithm=algorithm), {"data": 8})
    compiled = function.lower(tree).compile()
    return ledger(compiled, mesh_of({"data": 8})).count(kind)


def test_the_program_has_one_collective_a_bucket():
    tree = [np.zeros((8, 4), np.float32) for _ in range(6)]
    assert count(Ring(), tree) == 14
    assert count(Ring(bucket_bytes=32), tree) == 3 * 14
    assert count(Ring(bucket_bytes=None), tree) == 6 * 14
    assert count(Ring(), [*tree, np.zeros((8, 4), np.float16)]) == 2 * 14


def test_auto_fuses_what_it_gives_to_our_own_and_leaves_xlas_alone():
    tree = [np.zeros((8, 4), np.float32) for _ in range(3)]
    assert count(OURS, tree) == 6
    assert count(Auto(), tree, "all-reduce") in (1, 3)
    lowered = mapped(lambda t: reduce_tree(t, "data", algorithm=Auto()), {"data": 8}).lower(tree)
    assert "concatenate" not in lowered.as_text()
    fused = Auto(bucket_bytes=1024)
    lowered = mapped(lambda t: reduce_tree(t, "data", algorithm=fused), {"data": 8}).lower(tree)
    assert "concatenate" in lowered.as_text()


def test_a_scalar_and_an_empty_tree():
    def function(x):
        assert reduce_tree({}, "data", algorithm=Ring()) == {}
        return reduce_tree({"loss": x, "one": 1.0}, "data", algorithm=Ring())

    reduced = mapped(function, {"data": 8})(np.arange(8, dtype=np.float32))
    assert reduced["loss"].tolist() == [28.0] * 8
    assert reduced["one"].tolist() == [8.0] * 8


def test_it_can_be_differentiated():
    """Each leaf's weight times the sum over devices: the gradient is the weight, 8 times over."""

    def gradient(tree):
        def loss(tree):
            reduced = reduce_tree(tree, "data", algorithm=Ring())
            return 2 * reduced["a"].sum() + 3 * reduced["b"].sum()

        return jax.grad(loss)(tree)

    tree = {"a": np.ones((8, 2), np.float32), "b": np.ones((8, 3), np.float32)}
    found = mapped(gradient, {"data": 8})(tree)
    np.testing.assert_array_equal(found["a"], np.full((8, 2), 16.0))
    np.testing.assert_array_equal(found["b"], np.full((8, 3), 24.0))


@pytest.mark.parametrize("order", [[0, 0], [0], [1, 2], [0, 1, 2]])
def test_an_order_that_is_no_permutation_is_refused(order):
    with pytest.raises(CollectiveError, match=rf"order \{order} .*2 leaves: name .* 0 to 1 once"):
        plan_buckets(leaves_of(1, 1), 8, order)


def test_outside_of_shard_map_it_says_so():
    with pytest.raises(CollectiveError, match="reduce_tree over 'data' was called outside"):
        reduce_tree({"a": jnp.ones(2)}, "data", algorithm=Ring())


def test_the_mean_of_integers_is_refused():
    with pytest.raises(CollectiveError, match=r"int32\[2\].*the mean of integers"):
        mapped(lambda t: reduce_tree(t, "data", op="mean", algorithm=Ring()), {"data": 8})(
            [np.ones((8, 1), np.int32), np.ones((8, 1), np.int32)]
        )
