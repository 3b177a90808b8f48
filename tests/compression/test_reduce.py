"""Compressed reductions on 8 fake devices: the same bits everywhere, and the bytes of the wire."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compressed import of_one, reducer
from jax.sharding import AxisType
from sharded import mesh_of

from jaxdist.collectives import Ring
from jaxdist.compression import (
    Adaptive,
    Cast,
    Chain,
    CodecRule,
    CompressionError,
    Ef21,
    ErrorFeedback,
    LowRank,
    MomentumCorrection,
    NoFeedback,
    PerParameter,
    Quantize,
    RandomK,
    Sign,
    Stage,
    Stages,
    TopK,
    WholeCodec,
    compressed_all_reduce,
    first_round,
    init_state,
    sparsity_warm_up,
    warm_up,
)
from jaxdist.compression.codecs.lowrank import orthogonal
from jaxdist.errors import CollectiveError
from jaxdist.hlo import compile_with_text, ledger, ledger_of_text
from jaxdist.runtime.topology import topology_devices

N = 8
SHAPES = {"bias": (5,), "embed": (40, 24), "kernel": (3, 16, 24)}
CLASSIC = ErrorFeedback()


def gradients(seed=0, shapes=SHAPES, dtype="float32"):
    """Of all devices, stacked."""
    random = np.random.default_rng(seed)
    return {
        name: jnp.asarray(random.standard_normal((N, *shape)), dtype)
        for name, shape in shapes.items()
    }


def run(codec, feedback=CLASSIC, *, rounds=1, grads=None, mesh=None, **options):
    """Results of the last round, state and finite."""
    grads = gradients() if grads is None else grads
    made = {k: v for k, v in options.items() if k == "bucket_bytes"}
    state = init_state(of_one(grads), N, codec=codec, feedback=feedback, **made)
    reduce = reducer(mesh or mesh_of({"data": N}), codec=codec, feedback=feedback, **options)
    results = []
    for _ in range(rounds):
        result, state, finite = reduce(grads, state)
        results.append(jax.tree.map(np.asarray, result))
    return results, state, finite


MIXED = PerParameter(
    rules=(CodecRule(pattern="embed", codec=LowRank(rank=2)),), otherwise=warm_up(Sign(block=8), 1)
)
COMBINED = (
    (Cast(), CLASSIC),
    (Quantize(block=8), Ef21()),
    pytest.param(
        Quantize(bits=4, block=8, rounding="stochastic"), NoFeedback(), marks=pytest.mark.full
    ),
    pytest.param(Adaptive(bits=3, block=8), CLASSIC, marks=pytest.mark.full),
    (Sign(block=8), CLASSIC),
    pytest.param(Sign(block=8), Ef21(), marks=pytest.mark.slow),
    (TopK(fraction=0.1), MomentumCorrection(clip_norm=1.0)),
    pytest.param(TopK(fraction=0.1, method="exact"), Ef21(), marks=pytest.mark.full),
    pytest.param(RandomK(fraction=0.1), CLASSIC, marks=pytest.mark.slow),
    pytest.param(RandomK(fraction=0.1, scaled=True), NoFeedback(), marks=pytest.mark.full),
    (PerParameter(otherwise=LowRank(rank=2)), CLASSIC),
    pytest.param(PerParameter(otherwise=LowRank(rank=2)), Ef21(), marks=pytest.mark.slow),
    pytest.param(
        Chain(first=TopK(fraction=0.1), then=Quantize(block=8)), CLASSIC, marks=pytest.mark.full
    ),
    pytest.param(
        Chain(first=RandomK(fraction=0.25), then=Sign(block=8)), CLASSIC, marks=pytest.mark.slow
    ),
    (MIXED, CLASSIC),
    (Stages(stages=(Stage(start=0, codec=WholeCodec()), Stage(start=2, codec=TopK()))), Ef21()),
)


def label(value):
    return getattr(value, "type", None)


@pytest.mark.parametrize(("codec", "feedback"), COMBINED, ids=label)
@pytest.mark.every(3)
def test_results_have_the_same_bits_on_all_devices(devices, codec, feedback):
    # Several buckets where that is cheap to compile.
    small = 2048 if isinstance(codec, Sign) else 2**20
    results, state, finite = run(codec, feedback, rounds=3, bucket_bytes=small)
    for result in results:
        jax.tree.map(
            lambda x: np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape)), result
        )
    assert finite.all()
    assert np.asarray(state.step).tolist() == [3] * N
    assert not np.asarray(state.skipped).any()


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_stays_whole_is_the_plain_sum(devices, op, dtype):
    grads = gradients(dtype=dtype)
    (result,), _, _ = run(WholeCodec(), op=op, grads=grads)
    for name, x in grads.items():
        wide = np.asarray(x, np.float64).sum(0) / (N if op == "mean" else 1)
        assert result[name].dtype == x.dtype
        tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(
            np.asarray(result[name][0], np.float64), wide, tolerance, tolerance
        )


def conserved(codec, rounds=6):
    """What all rounds gave plus what all devices still keep, and what was put in, float64."""
    grads = gradients()
    results, state, _ = run(codec, rounds=rounds, grads=grads, bucket_bytes=2**20)
    (group,) = state.groups
    (bucket,) = group.buckets
    names = sorted(grads, reverse=True)
    flat = [
        np.concatenate([r[name][0].astype(np.float64).ravel() for name in names]) for r in results
    ]
    size = flat[0].size
    kept = sum(np.asarray(x, np.float64).sum(0) for x in bucket.up.values())
    down = (
        sum((np.asarray(x, np.float64).reshape(-1)[:size] for x in bucket.down.values()), 0.0)
        if bucket.down
        else 0.0
    )
    given = np.concatenate([np.asarray(grads[n], np.float64).sum(0).ravel() for n in names])
    return sum(flat) + kept + down, rounds * given


@pytest.mark.parametrize(
    "codec",
    [Sign(block=8), Quantize(bits=4, block=8), TopK(fraction=0.1), RandomK(fraction=0.1)],
    ids=label,
)
@pytest.mark.every(3)
def test_nothing_is_lost_over_the_rounds(devices, codec):
    """The sum of results and of all residuals, on both ways, is the sum of the gradients."""
    found, given = conserved(codec)
    np.testing.assert_allclose(found, given, rtol=0, atol=2e-4)


@pytest.mark.full
def test_without_feedback_it_is_lost(devices):
    results, _, _ = run(Sign(block=8), NoFeedback(), rounds=20)
    fed, _, _ = run(Sign(block=8), rounds=20)
    exact = np.asarray(gradients()["embed"], np.float64).mean(0) * N

    def error(found):
        return np.linalg.norm(np.mean([r["embed"][0] for r in found], 0) - exact)

    assert error(fed) < 0.5 * error(results)


@pytest.mark.full
def test_the_view_of_ef21_is_the_running_sum_on_every_device(devices):
    codec, feedback = Sign(block=8), Ef21()
    results, state, _ = run(codec, feedback, rounds=5, bucket_bytes=2**20)
    (bucket,) = state.groups[0].buckets
    view = np.asarray(bucket.down_view["estimate"])
    np.testing.assert_array_equal(view, np.broadcast_to(view[:1], view.shape))
    last = np.concatenate([results[-1][name][0].ravel() for name in sorted(SHAPES, reverse=True)])
    np.testing.assert_array_equal(view[0], last)
    # What the owner of a shard remembers of its own messages is its part of that view.
    shards = np.asarray(bucket.down["estimate"]).reshape(-1)[: last.size]
    np.testing.assert_array_equal(shards, last)


@pytest.mark.parametrize("codec", [Sign(block=8), WholeCodec()], ids=label)
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.every(3)
def test_a_bad_gradient_on_one_device_is_skipped_on_all(devices, codec, value):
    grads = gradients()
    state = init_state(of_one(grads), N, codec=codec)
    reduce = reducer(mesh_of({"data": N}), codec=codec)
    _, state, _ = reduce(grads, state)
    bad = {**grads, "kernel": grads["kernel"].at[5, 0, 0, 0].set(value)}
    result, after, finite = reduce(bad, state)
    assert not finite.any()
    assert all(np.isnan(x).all() for x in result.values())
    jax.tree.map(np.testing.assert_array_equal, after.groups, state.groups)
    assert (np.asarray(after.step).tolist(), np.asarray(after.skipped).tolist()) == (
        [2] * N,
        [1] * N,
    )
    assert reduce(grads, after)[2].all()


@pytest.mark.full
def test_stages_begin_at_their_steps(devices):
    results, _, _ = run(warm_up(Sign(block=8), 2), rounds=3)
    exact = np.asarray(gradients()["embed"]).sum(0)
    np.testing.assert_allclose(results[0]["embed"][0], exact, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(results[1]["embed"][0], exact, rtol=1e-4, atol=1e-5)
    assert np.abs(results[2]["embed"][0] - exact).max() > 0.5


def test_the_schedule_of_deep_gradient_compression():
    found = sparsity_warm_up(TopK(fraction=0.001), 8)
    assert [(s.start, s.codec.fraction) for s in found.stages] == [
        (0, 0.25),
        (2, 0.0625),
        (4, 0.015625),
        (6, 0.004),
        (8, 0.001),
    ]
    assert sparsity_warm_up(TopK(fraction=0.5), 8) == TopK(fraction=0.5)


@pytest.mark.slow
def test_hand_written_collectives_carry_messages_too(devices):
    for codec in (Sign(block=8), TopK(fraction=0.1), PerParameter(otherwise=LowRank(rank=2))):
        plain, _, _ = run(codec, rounds=2)
        ring, _, _ = run(codec, rounds=2, algorithm=Ring())
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), plain, ring
        )


LARGE = {"w": (512, 514)}
PAYLOAD = 4 * 512 * 514
RING = 2 * (N - 1) / N * PAYLOAD


def sent_over_ring(codec, feedback=CLASSIC):
    """Bytes that a device sends in the compiled program, over those of a float32 ring."""
    mesh, grads = mesh_of({"data": N}), gradients(shapes=LARGE)
    state = init_state(of_one(grads), N, codec=codec, feedback=feedback)
    compiled = reducer(mesh, codec=codec, feedback=feedback).lower(grads, state).compile()
    flag = 2 * (N - 1) / N * 4  # whether all is finite
    return (ledger(compiled, mesh).sent_bytes() - flag) / RING


@pytest.mark.parametrize(
    ("codec", "limit"),
    [
        (WholeCodec(), 1.0),
        (Cast(), 0.5),
        (Cast(dtype="float16"), 0.5),
        (Cast(dtype="float8_e4m3"), 0.25),
        (Quantize(), 0.27),
        (Quantize(bits=4), 0.14),
        (Adaptive(bits=3), 0.1),
        (Sign(), 0.035),
        (RandomK(fraction=0.01), 0.01),
        (LowRank(rank=4), 4 * (512 + 514) / (512 * 514)),
    ],
    ids=label,
)
@pytest.mark.every(3)
def test_wire_bytes_of_the_compiled_program(devices, codec, limit):
    assert 0.9 * limit < sent_over_ring(codec) <= limit * (1 + 2e-4)


@pytest.mark.full
def test_topk_receives_what_the_formula_says(devices):
    fraction, size = 0.01, 512 * 514
    received = sent_over_ring(TopK(fraction=fraction)) * RING  # a gather receives what it sends
    assert received == pytest.approx(8 * fraction * size * (N - 1), rel=0.02)


@pytest.mark.slow  # that of CPU: test_wire_bytes_of_the_compiled_program
@pytest.mark.needs_libtpu
def test_the_program_for_a_tpu_sends_as_few():
    chips = topology_devices("v5e:2x4")
    mesh = jax.make_mesh((N,), ("data",), (AxisType.Auto,), devices=chips)
    like = {"w": jax.ShapeDtypeStruct((N, 512, 512), jnp.float32)}
    for codec, limit in ((Sign(), 0.035), (Quantize(), 0.27), (Cast(), 0.5)):
        state = jax.eval_shape(lambda codec=codec: init_state(of_one(like), N, codec=codec))
        _, text = compile_with_text(reducer(mesh, codec=codec).lower(like, state))
        found = ledger_of_text(text, {"data": N})
        ring = 2 * (N - 1) / N * 4 * 512 * 512
        assert 0.9 * limit < found.sent_bytes() / ring <= limit * (1 + 1e-3), codec
        wide = [c for c in found.collectives if c.payload_bytes > 1024 and "f32" in c.dtypes]
        assert not wide, wide


@pytest.mark.parametrize(
    ("codec", "feedback", "message"),
    [
        (
            LowRank(),
            CLASSIC,
            r"parameter bias float32\[5\]: lowrank needs a matrix; send this array uncompressed",
        ),
        (
            Quantize(rounding="stochastic"),
            CLASSIC,
            r"is unbiased, .*feedback: false, .*or use a b",
        ),
        (RandomK(scaled=True), Ef21(), "error feedback ef21 does not work with .*is unbiased"),
        (
            Chain(first=RandomK(scaled=True), then=Quantize(rounding="stochastic")),
            CLASSIC,
            "unbiased",
        ),
        (Chain(first=RandomK(scaled=True), then=Sign()), CLASSIC, "scales up the elements"),
        (
            PerParameter(rules=(CodecRule(pattern="kernels", codec=Sign()),), otherwise=Sign()),
            CLASSIC,
            "rule 'kernels' fits no parameter: did you mean 'kernel'",
        ),
        (
            PerParameter(
                otherwise=Stages(
                    stages=(Stage(start=0, codec=Sign()), Stage(start=1, codec=LowRank()))
                )
            ),
            CLASSIC,
            "encodes flat shards. Use codecs",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(codec, feedback, message):
    with pytest.raises(CompressionError, match=message):
        init_state(of_one(gradients()), N, codec=codec, feedback=feedback)


def test_integers_are_refused_with_their_name():
    tree = {"counts": jax.ShapeDtypeStruct((3,), jnp.int32)}
    with pytest.raises(CompressionError, match=r"sign of parameter counts int32\[3\]: .* floating"):
        init_state(tree, N, codec=Sign())


def test_a_state_of_other_arguments_is_refused(devices):
    grads = gradients()
    state = init_state(of_one(grads), N, codec=Sign())
    with pytest.raises(
        CompressionError, match=r"does not fit the other .*\. Create the state by init_state"
    ):
        reducer(mesh_of({"data": N}), codec=TopK())(grads, state)


def test_outside_of_shard_map_it_says_so():
    grads = of_one(gradients())
    with pytest.raises(
        CollectiveError, match="compressed_all_reduce over 'data' was called outside"
    ):
        compressed_all_reduce(grads, init_state(grads, 1, codec=Sign()), "data", codec=Sign())


def clipped(gradient, limit):
    norm = np.linalg.norm(gradient)
    return gradient * min(1.0, limit / norm)


@pytest.mark.parametrize("nesterov", [False, True])
def test_deep_gradient_compression_step_by_step(devices, nesterov):
    """Algorithm 4 of arXiv 1712.01887 with the clipping of section 3, in float64."""
    momentum, clip, size, rounds = 0.7, 2.0, 60, 5
    random = np.random.default_rng(3)
    codec = TopK(fraction=0.1, method="exact")
    feedback = MomentumCorrection(momentum=momentum, clip_norm=clip, nesterov=nesterov)
    state = init_state(
        {"w": jax.ShapeDtypeStruct((size,), "float32")}, N, codec=codec, feedback=feedback
    )
    reduce = reducer(mesh_of({"data": N}), codec=codec, feedback=feedback)
    u, v = np.zeros((N, size)), np.zeros((N, size))
    for _ in range(rounds):
        grads = random.standard_normal((N, size)).astype(np.float32)
        result, state, _ = reduce({"w": grads}, state)
        expected = np.zeros(size)
        for k in range(N):
            g = clipped(grads[k].astype(np.float64), clip / np.sqrt(N))
            u[k] = momentum * (u[k] + g) if nesterov else momentum * u[k] + g
            v[k] += u[k] + g if nesterov else u[k]
            mask = np.abs(v[k]) >= np.sort(np.abs(v[k]))[-6]
            expected += np.where(mask, v[k], 0)
            u[k], v[k] = np.where(mask, 0, u[k]), np.where(mask, 0, v[k])
        np.testing.assert_allclose(np.asarray(result["w"][0]), expected, rtol=1e-4, atol=1e-5)
    (bucket,) = state.groups[0].buckets
    np.testing.assert_allclose(bucket.up["velocity"], u, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(bucket.up["sum"], v, rtol=1e-4, atol=1e-5)


def gram_schmidt(p):
    q = np.array(p)
    for i in range(q.shape[1]):
        for j in range(i):
            q[:, i] -= (q[:, j] @ q[:, i]) * q[:, j]
        q[:, i] /= np.linalg.norm(q[:, i])
    return q


@pytest.mark.full
def test_powersgd_step_by_step(devices):
    """Algorithms 1 and 2 of arXiv 1905.13727, in float64."""
    rows, columns, rounds, codec = 20, 12, 4, LowRank(rank=3)
    random = np.random.default_rng(4)
    like = {"w": jax.ShapeDtypeStruct((rows, columns), "float32")}
    state = init_state(like, N, codec=codec)
    reduce = reducer(mesh_of({"data": N}), codec=codec, op="mean")
    q = np.asarray(codec.init(like["w"])["q"][0], np.float64)
    error = np.zeros((N, rows, columns))
    for _ in range(rounds):
        grads = random.standard_normal((N, rows, columns)).astype(np.float32)
        result, state, _ = reduce({"w": grads}, state)
        delta = grads / N + error  # what each device adds to the mean
        p = gram_schmidt((delta @ q).sum(0))
        own = np.swapaxes(delta, 1, 2) @ p
        q = own.sum(0)
        error = delta - p @ np.swapaxes(own, 1, 2)
        np.testing.assert_allclose(np.asarray(result["w"][0]), p @ q.T, rtol=1e-3, atol=1e-5)
    (bucket,) = state.groups[0].buckets
    np.testing.assert_allclose(bucket.up["residual"], error, rtol=1e-3, atol=1e-5)


def test_dependent_columns_become_zero_and_the_others_orthonormal():
    random = np.random.default_rng(5)
    one, two = random.standard_normal((2, 9, 1)).astype(np.float32)
    given = np.concatenate([one, 3 * one, two, one - two, np.zeros_like(one)], axis=1)
    found = np.asarray(orthogonal(jnp.asarray(1e-25 * given)))
    np.testing.assert_array_equal(found[:, [1, 3, 4]], 0)
    np.testing.assert_allclose(found[:, [0, 2]].T @ found[:, [0, 2]], np.eye(2), atol=1e-6)


@pytest.mark.full
def test_lowrank_comes_back_to_life_after_gradients_of_zero():
    codec, zero = LowRank(rank=2), jnp.zeros((6, 5))
    _, state = codec.encode(zero, codec.init(zero), first_round())
    x = jnp.outer(jnp.arange(6.0), jnp.ones(5))
    message, _ = codec.encode(x, state, first_round())
    np.testing.assert_allclose(codec.decode(message, x, first_round()), x, atol=1e-5)
