"""Each codec beside a transcription of its paper in float64 numpy, and what it refuses."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.compression import (
    Adaptive,
    Cast,
    Chain,
    CompressionError,
    LowRank,
    Quantize,
    RandomK,
    Sender,
    Sign,
    Stage,
    Stages,
    TopK,
    WholeCodec,
    first_round,
)
from jaxdist.compression.codecs.adaptive import allocate
from jaxdist.compression.codecs.topk import LEAST_SAMPLE

SEED = 5
BF16 = 2.0**-8
"""Relative error of a scale of eight bits, rounded to nearest or up."""


def normal(*shape, seed=SEED):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def estimate(codec, x, round=None):
    """What one message says, float64."""
    round = first_round() if round is None else round
    message, _ = jax.jit(codec.encode)(x, codec.init(x), round)
    return np.asarray(jax.jit(codec.decode, static_argnums=1)(message, like(x), round), np.float64)


def like(x):
    return jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype)


def blocks_of(x, block):
    """The blocks, the last one short."""
    flat = np.asarray(x, np.float64).ravel()
    return [flat[i : i + block] for i in range(0, flat.size, block)]


@pytest.mark.parametrize("shape", [(1,), (100,), (3, 333)])
def test_sign_is_the_mean_of_the_block_with_signs(shape):
    x = normal(*shape)
    paper = [np.sign(b) * np.abs(b).mean() for b in blocks_of(x, 64)]
    found = estimate(Sign(block=64), x).ravel()
    np.testing.assert_allclose(found, np.concatenate(paper), rtol=BF16)


@pytest.mark.parametrize("bits", [4, 8])
def test_nearest_errs_by_half_a_level_at_most(bits):
    x = normal(10, 100)
    levels = 2 ** (bits - 1) - 1
    found = blocks_of(estimate(Quantize(bits=bits, block=32), x), 32)
    for ours, block in zip(found, blocks_of(x, 32), strict=True):
        scale = np.abs(block).max() / levels * (1 + 2 * BF16)
        assert np.abs(ours - block).max() <= scale / 2
        step = np.abs(ours[ours != 0]).min()
        assert len({round(v / step, 3) for v in np.abs(ours)}) <= levels + 1


def test_stochastic_rounding_is_unbiased():
    """Hoeffding: each draw is within one level s, so that of a mean of k draws an error above
    s sqrt(ln(2 / p) / 2 k) has a chance below p."""
    x, draws, levels = normal(3, 32), 2000, 7
    codec = Quantize(bits=4, block=32, rounding="stochastic")
    encode = jax.vmap(lambda rank: decoded_by(codec, x, first_round(rank=rank)))
    mean = np.asarray(jax.jit(encode)(jnp.arange(draws)), np.float64).mean(0)
    for ours, block in zip(mean, x, strict=True):
        level = np.abs(block).max() / levels * (1 + 2 * BF16)
        bound = level * math.sqrt(math.log(2 / (1e-6 / x.size)) / (2 * draws))
        assert np.abs(ours - block).max() < bound
    nearest = estimate(Quantize(bits=4, block=32), x)
    assert np.abs(nearest - x).max() > 2 * bound


def decoded_by(codec, x, round):
    message, _ = codec.encode(jnp.asarray(x), (), round)
    return codec.decode(message, like(x), round)


def test_scaled_randomk_is_unbiased_and_the_plain_one_is_not():
    x, draws, c = normal(40), 4000, 4
    mean = {}
    for scaled in (True, False):
        codec = RandomK(fraction=1 / c, scaled=scaled)
        encode = jax.vmap(lambda step, codec=codec: decoded_by(codec, x, first_round(step=step)))
        mean[scaled] = np.asarray(jax.jit(encode)(jnp.arange(draws)), np.float64).mean(0)
    # Hoeffding again: each draw is 0 or c x.
    bound = c * np.abs(x) * math.sqrt(math.log(2 / (1e-6 / x.size)) / (2 * draws))
    assert (np.abs(mean[True] - x) < bound).all()
    assert (np.abs(mean[False] - x / c) < bound / c).all()


@pytest.mark.full
def test_randomk_sends_one_of_c_neighbours_and_no_position():
    x = normal(103)
    codec = RandomK(fraction=0.1)
    found = estimate(codec, x)
    for ours, block in zip(blocks_of(found, 10), blocks_of(x, 10), strict=True):
        kept = ours != 0
        assert kept.sum() == 1 or len(block) < 10
        np.testing.assert_array_equal(ours[kept], block[kept])
    assert codec.wire_bytes(like(x)) == 4 * 11
    other = estimate(codec, x, first_round(step=1))
    assert ((found != 0) != (other != 0)).any()
    # Other devices draw alike.
    np.testing.assert_array_equal(found, estimate(codec, x, first_round(rank=3)))


@pytest.mark.parametrize("method", ["exact", "sampled"])
@pytest.mark.parametrize(("size", "fraction"), [(1, 0.5), (1000, 0.03), (LEAST_SAMPLE, 1.0)])
def test_topk_keeps_the_largest(method, size, fraction):
    x = normal(size)
    found = estimate(TopK(fraction=fraction, method=method), x)
    count = max(1, round(fraction * size))
    paper = np.where(np.abs(x) >= np.sort(np.abs(x))[-count], x, 0)
    np.testing.assert_array_equal(found, paper)


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "fraction"),
    [
        (65_537, 0.005),
        pytest.param(50_000, 0.2, marks=pytest.mark.full),
        *(pytest.param(size, 0.01, marks=pytest.mark.slow) for size in (50_000, 65_537)),
        pytest.param(50_000, 0.005, marks=pytest.mark.slow),
        pytest.param(65_537, 0.2, marks=pytest.mark.slow),
    ],
)
def test_a_sampled_threshold_takes_nearly_the_largest(size, fraction):
    """Elements above a threshold, k at most; their energy is nearly that of the k largest."""
    codec, x = TopK(fraction=fraction), normal(size)
    order = np.sort(np.abs(x))[::-1].astype(np.float64)
    best = (order[: codec.count(size)] ** 2).sum()
    for step in range(3):
        found = estimate(codec, x, first_round(step=step))
        kept = found != 0
        np.testing.assert_array_equal(found[kept], x[kept])
        # 128 of the sample lie above: 4 standard deviations are 35%.
        assert 0.65 * codec.count(size) <= kept.sum() <= codec.count(size)
        assert (found**2).sum() > 0.65 * best
        outside = np.abs(x[~kept])
        assert np.quantile(outside, 1 - fraction) <= np.abs(x[kept]).min()


@pytest.mark.full
def test_of_too_many_above_the_threshold_others_are_taken_in_other_rounds():
    x = np.ones(40_000, np.float32)
    codec = TopK(fraction=0.1)
    first, second = (estimate(codec, x, first_round(step=step)) for step in range(2))
    assert first.sum() == second.sum() == 4000
    assert (first != second).any()


@pytest.mark.full
def test_feedback_sends_everything_in_time():
    codec = TopK(fraction=0.05)
    sender, x = Sender(codec), jnp.asarray(normal(20_000))
    encode, state = jax.jit(sender.encode), sender.init(x)
    sent = np.zeros(x.shape, bool)
    for step in range(60):
        out = encode(x, state, first_round(step=step))
        state = out.state
        sent |= np.asarray(out.decoded) != 0
    # Sums grow by |x| a round and are sent at about sum |x| / 1000 = 16: 24 rounds for the median.
    assert sent[np.abs(x) > np.median(np.abs(x))].all()


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("bfloat16", 8), ("float16", 11), ("float8_e4m3", 4), ("float8_e5m2", 3)],
)
def test_casts_err_by_half_of_the_last_bit(dtype, bits):
    x = 1e6 * normal(1000)
    found = estimate(Cast(dtype=dtype), x)
    large = np.abs(x) > 1e-3 * np.abs(x).max() if dtype == "float8_e4m3" else np.full(x.shape, True)
    assert (np.abs(found - x) / np.abs(x))[large].max() <= 2.0**-bits
    np.testing.assert_array_equal(estimate(Cast(dtype=dtype), np.zeros(4, np.float32)), 0)


def best_error(energy, planes):
    """The least sum of E 4^-b over all allocations of 0 or 2 to 8 bits."""
    choices = itertools.product([0, *range(2, 9)], repeat=len(energy))
    return min(
        sum(e * 4.0**-b for e, b in zip(energy, bits, strict=True))
        for bits in choices
        if sum(bits) <= planes
    )


@pytest.mark.parametrize("seed", range(6))
def test_bits_go_where_they_take_off_most(seed):
    random = np.random.default_rng(seed)
    energy = 10.0 ** random.uniform(-4, 4, 4)
    planes = int(random.integers(4, 30))
    bits = np.asarray(jax.jit(allocate, static_argnums=1)(jnp.asarray(energy, jnp.float32), planes))
    assert bits.sum() <= planes
    assert not (bits == 1).any()
    found = (energy * 4.0**-bits).sum()
    # Two planes of a first step may straddle the end: one plane is then left over.
    assert found <= best_error(energy, planes - 1) * (1 + 1e-4)


@pytest.mark.full
def test_adaptive_codes_are_whole_numbers_of_their_bits():
    sizes = 10.0 ** np.array([0, 0, -1, -2, -4, 2])
    x = (normal(6, 64) * sizes[:, None]).astype(np.float32)
    codec = Adaptive(bits=3, block=64)
    message, _ = codec.encode(x, (), first_round())
    bits, found = np.asarray(message["bits"]), estimate(codec, x)
    assert message["planes"].shape == (18, 8)
    assert bits.tolist() == [*sorted(bits[:5].tolist(), reverse=True), bits.max()]
    assert bits[4] == 0
    for ours, block, b in zip(found, x, bits, strict=True):
        levels = 2 ** (int(b) - 1) - 1 if b else 0
        step = np.abs(block).max() / levels * (1 + 2 * BF16) if b else 2 * np.abs(block).max()
        assert np.abs(ours - block).max() <= step / 2


def test_the_budget_decides_without_another_program():
    codec = Adaptive(bits=2, block=64)
    encode = jax.jit(codec.encode)
    for seed in range(3):
        random = np.random.default_rng(seed)
        x = normal(8, 64, seed=seed) * 10.0 ** random.uniform(-3, 3, (8, 1))
        message, _ = encode(x.astype(np.float32), (), first_round())
        assert 14 <= int(message["bits"].sum()) <= 16
    assert encode._cache_size() == 1


@pytest.mark.full
def test_lowrank_finds_a_matrix_of_its_rank():
    """In two rounds, as the power iteration of algorithm 1 converges at once on such a matrix."""
    x = normal(20, 3) @ normal(3, 30, seed=1)
    np.testing.assert_allclose(estimate(LowRank(rank=3), x), x, atol=1e-4)
    stacked = np.stack([x, 2 * x[::-1]])
    np.testing.assert_allclose(
        estimate(LowRank(rank=3, stacked_dims=1), stacked), stacked, atol=2e-4
    )


def test_a_chain_encodes_the_chosen_elements():
    x = normal(600)
    chain = Chain(first=TopK(fraction=0.1, method="exact"), then=Quantize(bits=4, block=8))
    found, chosen = estimate(chain, x), estimate(chain.first, x)
    assert ((found != 0) <= (chosen != 0)).all()
    assert np.abs(found - chosen).max() <= np.abs(x).max() / 7 / 2 * (1 + 2 * BF16)
    assert chain.wire_bytes(like(x)) == 60 * 4 + 8 * (4 + 2)


@pytest.mark.parametrize(
    ("codec", "most"),
    [
        (WholeCodec(), 1.0),
        (Cast(), 0.5),
        (Quantize(), 0.27),
        (Quantize(bits=4), 0.14),
        (Sign(), 0.035),
        (TopK(fraction=0.01), 0.02),
    ],
    ids=lambda value: getattr(value, "type", None),
)
def test_bytes_over_float32(codec, most):
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    assert 0.9 * most <= codec.wire_bytes(x) / (4 * x.size) <= most * (1 + 1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: TopK(fraction=0.0),
            "a fraction of 0 of .* a fraction above 0 and at most 1, such as 0.01",
        ),
        (lambda: TopK(fraction=1.5), "a fraction of 1.5 of .* a fraction above 0 and at most 1"),
        (lambda: RandomK(fraction=-1.0), "a fraction of -1 of .* a fraction above 0 and at most 1"),
        (lambda: Quantize(bits=3), "3 bits are not supported: use 8 or 4"),
        (
            lambda: Adaptive(bits=0.5),
            "0.5 bits on average are out of range: use a number from 1 to 8",
        ),
        (
            lambda: Adaptive(bits=9.0),
            "9 bits on average are out of range: use a number from 1 to 8",
        ),
        (lambda: Sign(block=12), "a block of 12 elements is out of range: use a multiple of 8"),
        (lambda: Quantize(block=0), "a block of 0 elements is out of range: use a multiple of 8"),
        (lambda: Stages(stages=()), r"stages start at \[\]: the first stage must"),
        (
            lambda: Stages(stages=(Stage(start=1, codec=Sign()),)),
            r"start at \[1\]: the first stage must",
        ),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("codec", "shape", "dtype", "message"),
    [
        (Sign(), (5,), "int32", r"sign of int32\[5\]: codecs encode only floating-point arrays"),
        (
            TopK(),
            (0, 3),
            "float32",
            r"topk of float32\[0,3\]|topk of float32\[0, 3\]: the array is empty",
        ),
        (
            LowRank(rank=5),
            (9, 4),
            "float32",
            "rank 5 exceeds the largest rank of a 9 x 4 matrix: set 4 or",
        ),
        (
            LowRank(stacked_dims=1),
            (9, 4),
            "float32",
            r"1 of the array's dims are stacked layers.* send this array",
        ),
        (
            Chain(first=TopK(), then=Sign()),
            (3,),
            "int8",
            r"int8\[3\]: codecs encode only floating-point",
        ),
    ],
)
def test_arrays_that_a_codec_cannot_encode_are_refused(codec, shape, dtype, message):
    with pytest.raises(CompressionError, match=message):
        Sender(codec).init(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))
