"""Steps that are skipped, loss scales and narrow parameters inside the compiled program."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from programs import build_program, exchange_of, place

from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.models.loss import Mean
from jaxdist.optim.build import AdamWConfig
from jaxdist.optim.lamb import LambConfig
from jaxdist.optim.loss_scale import DynamicLossScaleConfig
from jaxdist.optim.safety import SkipSpikesConfig
from jaxdist.parallel.contract import BatchContext, StepInputs
from jaxdist.parallel.zero import ZeroConfig, plan_zero
from jaxdist.train.assemble import views_of
from jaxdist.train.evaluate import evaluate

ROWS = 64
DATA, BOTH = {"data": 8}, {"data": 2, "tensor": 4}
full = partial(pytest.param, marks=pytest.mark.full)
WAYS = [(BOTH, 1, False), (BOTH, 4, False), (DATA, 2, True)]


class Normed(nnx.Module):
    """A layer with batch statistics, so that a batch leaves a trace in the buffers too."""

    def __init__(self, rngs):
        self.w = nnx.Param(rngs.normal((4, 8)), dims=("embed", "mlp"))
        self.norm = nnx.BatchNorm(8, use_bias=False, use_scale=False, rngs=rngs)
        self.out = nnx.Param(rngs.normal((8, 2)), dims=("mlp", "embed"))

    def __call__(self, x):
        hidden = self.norm((x.astype(self.w[...].dtype) @ self.w[...]).astype(jnp.float32))
        return hidden.astype(self.out[...].dtype) @ self.out[...]


def squares(module, batch):
    error = jnp.square(module(batch["x"]).astype(jnp.float32) - batch["target"]).sum(-1)
    return {"loss": Mean((error * batch["weight"]).sum(), batch["weight"].sum())}


def values(seed=0, bad=None, factor=1.0):
    x = np.random.default_rng(seed).normal(size=(ROWS, 4)).astype(np.float32)
    x[3, 1] = x[3, 1] if bad is None else bad
    target = np.full((ROWS, 2), factor, np.float32)
    return {"x": x, "target": target, "weight": np.arange(ROWS, dtype=np.float32) % 3}


def program(mesh=None, microbatches=1, ring=False, kind=AdamWConfig, **optim):
    name = kind.model_fields["type"].annotation.__args__[0]
    config = kind(type=name, learning_rate=0.05, **optim)
    reduce = Ring() if ring else None
    options = {"steps": 100, "microbatches": microbatches, "reduce": reduce}
    return build_program(Normed, squares, config, values(), mesh or DATA, **options)


def run(found, state, batches):
    """The state after these batches, and the metrics of each by name."""
    metrics = []
    for batch in batches:
        state, vector = found.train(state, place(found, batch))
        metrics.append(dict(zip(found.metrics, vector.tolist(), strict=True)))
    return state, metrics


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def kept(state):
    """All that a skipped step may not touch."""
    return bits((state.params, state.buffers, state.opt_state.inner))


@pytest.mark.parametrize(
    ("way", "bad"), list(zip(WAYS, (np.nan, np.inf, np.nan), strict=True)), ids=str
)
@pytest.mark.every(3)
def test_a_bad_batch_moves_nothing_to_the_bit(way, bad):
    found = program(*way, skip_nonfinite=True)
    state, _ = run(found, found.init(), [values(0), values(1)])
    before = kept(state)
    state, (metrics,) = run(found, state, [values(2, bad)])
    assert kept(state) == before
    assert int(state.step) == 3
    assert (metrics["skipped_steps"], metrics["skipped_in_a_row"]) == (1, 1)
    state, (metrics,) = run(found, state, [values(3)])
    assert (metrics["skipped_steps"], metrics["skipped_in_a_row"]) == (1, 0)
    after = kept(state)
    assert all(a != b for a, b in zip(after, before, strict=True))
    assert found.train._cache_size() == 1


def test_without_skipping_a_bad_batch_spoils_the_state():
    found = program()
    state, _ = run(found, found.init(), [values(0, np.nan)])
    assert np.isnan(np.asarray(state.params["w"])).all()


@pytest.mark.parametrize("way", WAYS[1:], ids=str)
@pytest.mark.every(2)
def test_good_steps_are_those_without_skipping(way):
    plain, guarded = (program(*way, clip_norm=0.5, skip_nonfinite=skip) for skip in (False, True))
    expected, _ = run(plain, plain.init(), [values(i) for i in range(4)])
    state, _ = run(guarded, guarded.init(), [values(i) for i in range(4)])
    for ours, theirs in zip(
        jax.tree.leaves((state.params, state.buffers)),
        jax.tree.leaves((expected.params, expected.buffers)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_a_spike_is_seen_before_it_is_clipped():
    spikes = SkipSpikesConfig(factor=5.0, window=3)
    found = program(BOTH, clip_norm=0.01, skip_spikes=spikes)
    state, metrics = run(found, found.init(), [values(i) for i in range(4)])
    assert [m["skipped_steps"] for m in metrics] == [0, 0, 0, 0]
    before = kept(state)
    state, metrics = run(found, state, [values(4, factor=1e3), values(5, np.nan)])
    assert [m["skipped_in_a_row"] for m in metrics] == [1, 2]
    assert kept(state) == before
    state, metrics = run(found, state, [values(6)])
    assert metrics[0]["skipped_in_a_row"] == 0


SCALE = DynamicLossScaleConfig(type="dynamic", init_scale=2.0**10, growth_steps=3)


@pytest.mark.parametrize("way", [pytest.param(WAYS[0], marks=pytest.mark.full), *WAYS[1:]], ids=str)
@pytest.mark.every(2)
def test_a_loss_scale_changes_no_gradient_and_lives_in_the_state(way):
    plain, scaled = program(*way), program(*way, loss_scale=SCALE)
    expected, theirs = run(plain, plain.init(), [values(i) for i in range(4)])
    state, ours = run(scaled, scaled.init(), [values(i) for i in range(4)])
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(
            [m[name] for m in ours], [m[name] for m in theirs], rtol=1e-5, atol=1e-6
        )
    np.testing.assert_allclose(state.params["w"], expected.params["w"], rtol=1e-4, atol=1e-5)
    assert [m["loss_scale"] for m in ours] == [2.0**10] * 3 + [2.0**11]
    before = kept(state)
    state, _ = run(scaled, state, [values(5, np.inf)])
    assert kept(state) == before
    assert (float(state.loss_scale.scale), int(state.loss_scale.good_steps)) == (2.0**10, 0)


def test_a_scale_too_high_for_float16_backs_off_until_the_run_moves():
    scale = DynamicLossScaleConfig(type="dynamic", init_scale=2.0**24)
    found = program(BOTH, microbatches=2, master_weights="float16", loss_scale=scale)
    state, metrics = run(found, found.init(), [values(i) for i in range(20)])
    assert metrics[0]["skipped_in_a_row"] == 1
    assert metrics[-1]["skipped_in_a_row"] == 0
    assert metrics[-1]["loss_scale"] == 2.0 ** (24 - metrics[-1]["skipped_steps"])
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert int(state.opt_state.skipped) > 3


@pytest.mark.full
@pytest.mark.parametrize("way", [WAYS[0], *(full(way) for way in WAYS[1:])], ids=str)
def test_without_a_scale_float16_bears_as_many_tokens_as_float32(way):
    """Gradients of the total loss would overflow: a backward pass begins with the mean's."""
    batch = values(0)
    batch["weight"] = batch["weight"] * 1e6
    metrics = [
        run(found, found.init(), [batch])[1][0]
        for found in (
            program(*way, skip_nonfinite=True, **narrow)
            for narrow in ({"master_weights": "float16"}, {})
        )
    ]
    assert metrics[0]["skipped_steps"] == 0
    assert metrics[0]["grad_norm"] == pytest.approx(metrics[1]["grad_norm"], rel=0.01)


def test_microbatches_without_weight_count_for_nothing_under_a_loss_scale():
    batch = values(0)
    batch["weight"] = np.where(np.arange(ROWS) % 4 == 0, 0, 1).astype(np.float32)
    found = program(BOTH, microbatches=4, loss_scale=SCALE)
    _, (metrics,) = run(found, found.init(), [batch])
    assert metrics["skipped_steps"] == 0
    assert np.isfinite(metrics["grad_norm"])


@pytest.mark.full
@pytest.mark.parametrize(("stage", "microbatches"), [full(1, 2), full(2, 2), (3, 1)])
def test_a_loss_scale_with_zero_and_devices_that_weigh_unlike_rows(stage, microbatches):
    def split(found):
        zero = plan_zero(
            ZeroConfig(stage=stage, whole_below=0), found.layout, found.model.params, found.dims
        )
        exchange = exchange_of(found.model, found.layout, zero, Ring())
        views = views_of(found.model, zero, None)
        return replace(found, exchange=exchange, views=views)

    plain, scaled = (
        split(program(DATA, microbatches, ring=True, **given))
        for given in ({"skip_nonfinite": True}, {"loss_scale": SCALE})
    )
    _, theirs = run(plain, plain.init(), [values(i) for i in range(3)])
    _, ours = run(scaled, scaled.init(), [values(i) for i in range(3)])
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([m[name] for m in ours], [m[name] for m in theirs], rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (AdamWConfig, "bfloat16"),
        full(AdamWConfig, "float16"),
        full(LambConfig, "bfloat16"),
        (LambConfig, "float16"),
    ],
)
def test_narrow_parameters_are_the_rounded_master_weights(kind, dtype):
    found = program(BOTH, kind=kind, master_weights=dtype, microbatches=2)
    state = found.init()
    # Another program draws them, whose loops may round otherwise; in two bytes it is 2**16 ulp.
    for master, wide in zip(
        jax.tree.leaves(state.opt_state.inner.master),
        jax.tree.leaves(program(BOTH, kind=kind).init().params),
        strict=True,
    ):
        np.testing.assert_array_max_ulp(master, wide, maxulp=2)
    state, metrics = run(found, state, [values(i) for i in range(5)])
    for narrow, master in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(state.opt_state.inner.master), strict=True
    ):
        assert (narrow.dtype, master.dtype) == (jnp.dtype(dtype), jnp.float32)
        assert bits(narrow) == bits(np.asarray(master).astype(narrow.dtype))
        assert narrow.sharding == master.sharding
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    batches = [place(found, values())]
    assert evaluate(found, state.params, state.buffers, batches)["loss"] > 0


@pytest.mark.full
@pytest.mark.parametrize("kind", [full(AdamWConfig), LambConfig])
def test_moments_in_bfloat16_lie_like_their_parameters(kind):
    found = program(BOTH, kind=kind, bf16_moments=True)
    state, _ = run(found, found.init(), [values(0)])
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == (4, 8)]
    assert [m.dtype for m in moments] == [jnp.bfloat16] * 2
    assert {m.sharding.shard_shape(m.shape) for m in moments} == {(4, 2)}


ALL = {
    "loss_scale": SCALE,
    "master_weights": "bfloat16",
    "bf16_moments": True,
    "skip_spikes": SkipSpikesConfig(factor=50.0, window=2),
    "clip_norm": 1.0,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [full(AdamWConfig), LambConfig])
def test_everything_at_once_resumes_bit_for_bit(kind, tmp_path):
    found = program(BOTH, microbatches=2, kind=kind, **ALL)
    batches = [values(i, np.nan if i in (1, 4) else None) for i in range(8)]
    whole, expected = run(found, found.init(), batches)
    half, first = run(found, found.init(), batches[:5])
    with CheckpointStore(tmp_path, keep=1, keep_best=False, on_event=print) as store:
        store.save(5, half, metadata={})
        store.wait()
        restored = store.restore(program(BOTH, microbatches=2, kind=kind, **ALL).state_shapes)
    state, second = run(found, restored.state, batches[5:])
    assert bits(state) == bits(whole)
    assert second == expected[5:]
    assert [m["skipped_steps"] for m in first + second] == [0, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_sums_over_microbatches_and_devices_are_float32(way):
    found = program(*way, master_weights="bfloat16")
    state, key = found.state_shapes, jax.random.key(0)

    def grads_of(params, buffers, batch, key):
        held = StepInputs(params, params, buffers, None, batch, key)
        return found.compute.gradients(held, BatchContext()).grads

    grads = jax.eval_shape(grads_of, state.params, state.buffers, found.batch, key)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
