"""Feedback on several devices: what is sent in place of the gradient, round by round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compressed import of_one, reducer
from pydantic import ValidationError
from sharded import mesh_of

from jaxdist.compression import (
    CompressedMomentum,
    CompressionError,
    Ef21,
    ErrorFeedback,
    LowRank,
    Quantize,
    RandomK,
    Sign,
    TopK,
    init_state,
    warm_up,
)
from jaxdist.compression.reshard import reshard

N, ROWS, COLUMNS, BLOCK = 4, 9, 7, 8  # 63 elements: no multiple of the devices, nor of a block
B1 = 0.8
MOMENTUM = CompressedMomentum(b1=B1)


def drawn(seed):
    """A gradient of each device."""
    random = np.random.default_rng(seed)
    return random.standard_normal((N, ROWS, COLUMNS)).astype(np.float32)


def rounds(given, codec, feedback):
    """Result, state and `finite` after each round of gradients."""
    state = init_state(of_one({"w": given[0]}), N, codec=codec, feedback=feedback)
    reduce = reducer(mesh_of({"data": N}), codec=codec, feedback=feedback)
    for gradients in given:
        found, state, finite = reduce({"w": gradients}, state)
        yield np.asarray(found["w"]), state, bool(finite.all())


def flat(tree):
    """The arrays of a tree, which lie in each device's row, summed up in float64."""
    return sum((np.asarray(x, np.float64) for x in jax.tree.leaves(tree)), 0.0)


def kept(bucket):
    """What all residuals come to, of senders and of who encodes the sum again; [elements]."""
    down = np.reshape(flat(bucket.down), -1)[: ROWS * COLUMNS] if bucket.down else 0.0
    return flat(bucket.up).sum(0).reshape(-1) + down


CODECS = [Sign(block=BLOCK), Quantize(bits=4, block=BLOCK), TopK(fraction=0.1), LowRank(rank=2)]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.type)
@pytest.mark.every(3)
def test_what_is_lost_of_a_momentum_comes_back(devices, codec):
    """momentum + residuals = b1 momentum before + residuals before + (1 - b1) gradient.

    And an optimizer that is given the results has the same momentum, on all devices.
    """
    before, own = np.zeros(ROWS * COLUMNS), np.zeros(ROWS * COLUMNS)
    given = [drawn(seed) for seed in range(4)]
    for gradients, (found, state, finite) in zip(
        given, rounds(given, codec, MOMENTUM), strict=True
    ):
        assert finite
        ((bucket,),) = (group.buckets for group in state.groups)
        common = np.asarray(bucket.common["momentum"]).reshape(N, -1)
        for x in (found, common):
            np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
        now = common[0] + kept(bucket)
        expected = before + (1 - B1) * gradients.astype(np.float64).sum(0).ravel()
        np.testing.assert_allclose(now, expected, rtol=0, atol=1e-5)
        before = now - (1 - B1) * common[0]
        own = B1 * own + (1 - B1) * found[0].astype(np.float64).ravel()
        np.testing.assert_allclose(own, common[0], rtol=0, atol=1e-5)


@pytest.mark.full
def test_fewer_devices_go_on_with_the_same_momentum(devices):
    codec, given = Sign(block=BLOCK), [drawn(seed) for seed in range(3)]
    *_, (_, saved, _) = rounds(given[:2], codec, MOMENTUM)
    like = of_one({"w": given[0]})
    fewer = init_state(like, 2, codec=codec, feedback=MOMENTUM)
    state = jax.tree.map(np.asarray, reshard(saved, fewer, [2], [0]))
    reduce = reducer(mesh_of({"data": 2}), codec=codec, feedback=MOMENTUM)
    _, after, _ = reduce({"w": given[2][:2]}, state)
    old, new = saved.groups[0].buckets[0], after.groups[0].buckets[0]
    momenta = [flat(bucket.common)[0] for bucket in (old, new)]
    expected = B1 * momenta[0] + kept(old) + (1 - B1) * given[2][:2].sum(0).ravel()
    np.testing.assert_allclose(momenta[1] + kept(new), expected, rtol=0, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("codec", [Sign(block=BLOCK), TopK()], ids=lambda codec: codec.type)
def test_while_all_is_sent_gradients_are_exact(devices, codec):
    given = [drawn(seed) for seed in range(4)]
    found = [x for x, _, _ in rounds(given, warm_up(codec, 3), MOMENTUM)]
    for result, gradients in zip(found[:3], given[:3], strict=True):
        np.testing.assert_allclose(result[0], gradients.sum(0), rtol=0, atol=1e-5)
    assert np.abs(found[3][0] - given[3].sum(0)).max() > 0.1


@pytest.mark.full
def test_each_device_clips_its_own_gradient(devices):
    limit, given = 6.0, [drawn(seed) for seed in range(2)]
    given[0][1] *= 5
    feedback = CompressedMomentum(b1=B1, clip_norm=limit)
    norms = np.sqrt(np.square(given).sum((2, 3), keepdims=True))
    assert (norms > limit / N**0.5).all()
    expected = (given / norms * limit / N**0.5).sum(1)
    for i, (found, _, _) in enumerate(rounds(given, warm_up(Sign(block=BLOCK), 2), feedback)):
        np.testing.assert_allclose(found[0], expected[i], rtol=0, atol=1e-5)


@pytest.mark.parametrize("feedback", [MOMENTUM, Ef21()], ids=lambda feedback: feedback.type)
@pytest.mark.every(2)
def test_a_round_that_is_left_out_is_no_round_of_the_warm_up(devices, feedback):
    """So that an optimizer, which leaves it out too, is still told when the warm-up ends."""
    given = [drawn(seed) for seed in range(5)]
    given[1][2, 0, 0] = np.nan
    found = list(rounds(given, warm_up(Sign(block=BLOCK), 3), feedback))
    assert [finite for _, _, finite in found] == [True, False, True, True, True]
    jax.tree.map(np.testing.assert_array_equal, found[1][1].groups, found[0][1].groups)
    for i in (0, 2, 3):
        np.testing.assert_allclose(found[i][0][0], given[i].sum(0), rtol=0, atol=1e-5)
    assert np.abs(found[4][0][0] - given[4].sum(0)).max() > 0.1


def signs(x):
    """One bit an element and the mean of their sizes a block; scales of 8 bits."""
    blocks = x.reshape(-1, BLOCK)
    scale = np.abs(blocks).mean(1, keepdims=True)
    exponent = np.floor(np.log2(scale)) - 7
    scale = np.round(scale / 2**exponent) * 2**exponent
    return (np.where(blocks < 0, -1, 1) * scale).reshape(x.shape)


def test_ef21_step_by_step(devices):
    """Algorithm 2 of arXiv 2106.05203, and again for the sums of shards (arXiv 2110.03294)."""
    size = -(-ROWS * COLUMNS // N)
    real = np.arange(N * size) < ROWS * COLUMNS
    workers, server = np.zeros((N, N * size)), np.zeros(N * size)
    given = [drawn(seed) for seed in range(6)]
    for gradients, (found, state, _) in zip(
        given, rounds(given, Sign(block=BLOCK), Ef21()), strict=True
    ):
        wide = np.zeros((N, N * size))
        wide[:, real] = gradients.reshape(N, -1)
        workers += real * signs(wide - workers)
        server += real * signs(workers.sum(0) - server)
        expected = server[real].reshape(ROWS, COLUMNS)
        np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-5)
        own = state.groups[0].buckets[0].up["estimate"]
        np.testing.assert_allclose(own, workers[:, real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "feedback", [ErrorFeedback(), Ef21(), MOMENTUM], ids=lambda feedback: feedback.type
)
@pytest.mark.every(3)
def test_what_fills_up_the_last_shard_is_never_owed(devices, feedback):
    *_, (_, state, _) = rounds([drawn(seed) for seed in range(3)], Sign(block=BLOCK), feedback)
    ((bucket,),) = (group.buckets for group in state.groups)
    beyond = flat(bucket.down).reshape(-1)[ROWS * COLUMNS :]
    assert beyond.tolist() == [0.0]


@pytest.mark.parametrize("codec", [RandomK(scaled=True), Quantize(rounding="stochastic")])
def test_a_momentum_without_an_error_to_feed_back_is_refused(codec):
    like = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with pytest.raises(
        CompressionError,
        match=r"error feedback compressed_momentum does not work with .*is unbiased",
    ):
        init_state(like, N, codec=codec, feedback=MOMENTUM)


@pytest.mark.parametrize("b1", [0.0, 1.0, -0.1, float("nan")])
def test_a_decay_that_is_none_is_refused(b1):
    with pytest.raises(ValidationError, match="b1"):
        CompressedMomentum(b1=b1)
