from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from pydantic import ValidationError

from jaxdist.errors import ConfigError, RunError
from jaxdist.hlo import ledger
from jaxdist.optim import safety
from jaxdist.optim.loss_scale import DynamicLossScaleConfig, scale_loss, unscale

P = PartitionSpec
BAD = [jnp.nan, jnp.inf, -jnp.inf]


def make_params():
    return {"w": jnp.array([[1.0, -2.0], [-0.0, 3.0]]), "b": jnp.array([0.5, -0.0])}


def make_grads(scale=1.0):
    return jax.tree.map(lambda p: scale * (p + 1.0), make_params())


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def stepper(tx):
    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def norm_of(tree):
    return np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in jax.tree.leaves(tree)))


def test_global_norm_neither_overflows_nor_rounds_in_narrow_dtypes():
    tree = {"a": jnp.full((10_000,), 300, jnp.float16), "b": jnp.full((3,), 1.5, jnp.bfloat16)}
    np.testing.assert_allclose(safety.global_norm(tree), norm_of(tree), rtol=1e-6)
    assert safety.global_norm({}) == 0


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("leaf", ["w", "b"])
def test_one_bad_element_of_any_leaf_moves_nothing(leaf, bad):
    tx = safety.skip_nonfinite(optax.adamw(0.1, weight_decay=0.1))
    params, step = make_params(), stepper(tx)
    params, state = step(params, tx.init(params), make_grads())
    grads = make_grads()
    grads[leaf] = grads[leaf].at[-1].set(bad)
    same, skipped = step(params, state, grads)
    assert bits(same) == bits(params)
    assert bits(skipped.inner) == bits(state.inner)
    assert (int(skipped.skipped), int(skipped.consecutive)) == (1, 1)


def test_minus_zero_stays_minus_zero():
    tx = safety.skip_nonfinite(optax.sgd(0.1))
    params = make_params()
    same, _ = stepper(tx)(params, tx.init(params), make_grads(jnp.nan))
    assert bits(same) == bits(params)


def test_counters_over_a_run_and_good_steps_equal_the_inner_transform():
    tx, plain = safety.skip_nonfinite(optax.adam(0.1)), optax.adam(0.1)
    step, plain_step = stepper(tx), stepper(plain)
    params = wanted = make_params()
    state, plain_state = tx.init(params), plain.init(params)
    seen = []
    for scale in [1.0, jnp.nan, jnp.inf, 2.0, jnp.nan, 3.0]:
        params, state = step(params, state, make_grads(scale))
        if np.isfinite(scale):
            wanted, plain_state = plain_step(wanted, plain_state, make_grads(scale))
        seen.append((int(state.skipped), int(state.consecutive)))
    assert seen == [(0, 0), (1, 1), (2, 2), (2, 0), (3, 1), (3, 0)]
    jax.tree.map(np.testing.assert_array_equal, params, wanted)
    assert step._cache_size() == 1


def test_huge_finite_gradients_are_not_taken_for_infinite():
    tx = safety.skip_nonfinite(optax.sgd(1e-30))
    params = make_params()
    _, state = stepper(tx)(params, tx.init(params), make_grads(1e30))
    assert int(state.skipped) == 0


def test_integer_leaves_and_extra_arguments_pass():
    tx = safety.skip_nonfinite(
        optax.GradientTransformationExtraArgs(
            lambda params: optax.EmptyState(),
            lambda updates, state, params=None, *, factor: (
                jax.tree.map(lambda u: u * factor, updates),
                state,
            ),
        )
    )
    grads = {"n": jnp.array([1, 2]), "w": jnp.array([3.0])}
    updates, _ = tx.update(grads, tx.init(grads), factor=2)
    assert updates["n"].tolist() == [2, 4]
    grads["w"] = jnp.array([jnp.nan])
    updates, state = tx.update(grads, tx.init(grads), factor=2)
    assert updates["n"].tolist() == [0, 0]
    assert int(state.skipped) == 1


def test_map_params_finds_the_inner_moments():
    tx = safety.skip_spikes(safety.skip_nonfinite(optax.adam(0.1)))
    state = tx.init(make_params())
    marked = optax.tree.map_params(tx, lambda _: 1, state, transform_non_params=lambda _: 0)
    assert sum(jax.tree.leaves(marked)) == 2 * len(make_params())


def run_norms(norms, **settings):
    """Whether each gradient of these norms was skipped, and the last state."""
    tx = safety.skip_spikes(optax.sgd(0.0), **settings)
    state, step = tx.init(jnp.float32(0)), stepper(tx)
    skipped = []
    for norm in norms:
        before = int(state.skipped)
        _, state = step(jnp.float32(0), state, jnp.float32(norm))
        skipped.append(bool(int(state.skipped) > before))
    return skipped, state


def test_spikes_are_skipped_after_the_window_only():
    skipped, state = run_norms([9, 1, 1, 1, 11.5, 20, 20.5, 1], factor=4, window=4)
    # The means: 3 of the first four, 3 + 8.5 / 4 = 5.125, 8.84 after 20; limits are 4 times that.
    assert skipped == [False] * 8
    skipped, state = run_norms([9, 1, 1, 1, 12.5, 12.5, 21.5], factor=4, window=4)
    # 12.5 is over 12, enters as 12 and lifts the limit to 21.
    assert skipped == [False, False, False, False, True, False, False]
    assert int(state.skipped) == 1


def test_the_mean_follows_its_formula():
    _, state = run_norms([1, 2, 3, 8, 100], factor=2, window=3)
    # 2 after three; 8 is cut to the limit 4: 2 + 2/3; 100 to 16/3: 8/3 + (8/3)/3.
    np.testing.assert_allclose(state.rule.mean, 32 / 9, rtol=1e-6)
    assert (int(state.skipped), int(state.consecutive)) == (2, 2)


def test_a_lasting_change_of_level_is_accepted_in_the_end():
    skipped, _ = run_norms([1.0] * 10 + [10.0] * 20, factor=4, window=10)
    assert skipped[10]
    assert not skipped[-1]
    assert 1 <= sum(skipped) <= 10


@pytest.mark.parametrize("bad", BAD)
def test_a_spike_guard_skips_what_is_not_finite_and_does_not_remember_it(bad):
    skipped, state = run_norms([1, bad, 1], factor=4, window=100)
    assert skipped == [False, True, False]
    assert (float(state.rule.mean), int(state.rule.count)) == (1.0, 2)


def test_zero_gradients_set_no_limit():
    assert run_norms([0, 0, 0, 5], factor=4, window=2)[0] == [False] * 4


@pytest.mark.parametrize("factor", [1.0, 0.5, float("nan"), float("inf")])
def test_a_factor_that_is_no_factor(factor):
    with pytest.raises(ConfigError, match=f"factor {factor} must be finite and above 1"):
        safety.skip_spikes(optax.sgd(1.0), factor=factor)


def test_an_empty_window():
    with pytest.raises(ConfigError, match="window 0 must be at least 1"):
        safety.skip_spikes(optax.sgd(1.0), window=0)


def test_a_run_that_only_skips_is_stopped():
    tx = optax.chain(safety.skip_spikes(safety.skip_nonfinite(optax.sgd(0.1))))
    params = make_params()
    state, step = tx.init(params), stepper(tx)
    for _ in range(3):
        params, state = step(params, state, make_grads(jnp.nan))
    outer, inner = safety.skip_states(state)
    assert (int(outer.skipped), int(inner.skipped)) == (3, 0)
    counters = (int(outer.consecutive), int(outer.skipped))
    safety.check_skips(*counters, max_consecutive=3)
    with pytest.raises(
        RunError, match=r"3 consecutive .* \(at most 2 are allowed; 3 were skipped since"
    ):
        safety.check_skips(*counters, max_consecutive=2)


def mesh_of(devices):
    return jax.make_mesh((4, 2), ("data", "tensor"), (AxisType.Auto,) * 2, devices=devices)


SPECS = {"w": P("data", "tensor"), "b": P("tensor"), "s": P(), "z": P(("data", "tensor"))}


def sharded_grads():
    keys = iter(jax.random.split(jax.random.key(0), 4))
    shapes = {"w": (8, 4), "b": (6,), "s": (3,), "z": (16,)}
    return {name: jax.random.normal(next(keys), shape) for name, shape in shapes.items()}


def test_sharded_norm_counts_each_element_once_with_one_collective(devices):
    grads = sharded_grads()
    inside = jax.jit(
        jax.shard_map(
            partial(safety.global_norm, specs=SPECS),
            mesh=mesh_of(devices),
            in_specs=(SPECS,),
            out_specs=P(),
        )
    )
    np.testing.assert_allclose(inside(grads), norm_of(grads), rtol=1e-6)
    assert inside.lower(grads).compile().as_text().count(" all-reduce(") == 1


def test_the_norm_of_shards_sends_one_number(devices):
    """Under automatic sharding; a leaf that does not divide, and one that is whole, count too."""
    mesh = mesh_of(devices)
    grads = {**sharded_grads(), "odd": jnp.arange(7.0), "one": jnp.float32(3)}
    specs = {**SPECS, "odd": P("data"), "one": P()}
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    shardings["odd"] = NamedSharding(mesh, specs["odd"])

    def norm(grads):
        return safety.global_norm_of_shards(grads, shardings)

    np.testing.assert_allclose(jax.jit(norm)(grads), norm_of(grads), rtol=1e-6)
    split = {name: g for name, g in grads.items() if name != "odd"}
    del shardings["odd"]
    placed = jax.device_put(split, shardings)
    compiled = jax.jit(norm).lower(placed).compile()
    found = [c for c in ledger(compiled, mesh).collectives if c.kind == "all-reduce"]
    assert [(c.payload_bytes, c.times_high) for c in found] == [(4, 1)]


@pytest.mark.parametrize("manual", [True, False], ids=["manual", "auto"])
@pytest.mark.parametrize("leaf", sorted(SPECS))
@pytest.mark.every(3)
def test_all_shards_skip_when_one_of_them_is_bad(devices, leaf, manual):
    mesh, specs = mesh_of(devices), SPECS if manual else None
    tx = safety.skip_nonfinite(optax.trace(0.9), specs=specs)
    params = {name: jnp.ones_like(g) for name, g in sharded_grads().items()}
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    params, grads = jax.device_put((params, sharded_grads()), (shardings, shardings))
    state = tx.init(params)
    state_specs = optax.tree.map_params(
        tx, lambda _, spec: spec, state, SPECS, transform_non_params=lambda _: P()
    )
    step = stepper(tx)
    if manual:
        step = jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(SPECS, state_specs, SPECS),
                out_specs=(SPECS, state_specs),
            )
        )
    params, state = step(params, state, grads)
    grads[leaf] = grads[leaf].at[(-1,) * grads[leaf].ndim].set(jnp.nan)
    same, skipped = step(params, state, grads)
    assert bits(same) == bits(params)
    assert bits(skipped.inner) == bits(state.inner)
    assert int(skipped.skipped) == 1
    assert skipped.inner.trace["w"].sharding.is_equivalent_to(shardings["w"], 2)


def scale_run(flags, **settings):
    scaling = DynamicLossScaleConfig(type="dynamic", **settings)
    state, update = scaling.init(), jax.jit(scaling.update)
    scales = []
    for finite in flags:
        state = update(state, jnp.array(finite))
        scales.append(float(state.scale))
    return scales


def test_the_scale_grows_after_n_good_steps_in_a_row_and_backs_off_at_once():
    flags = [True, True, True, False, True, True, False, True, True, True]
    scales = scale_run(flags, init_scale=8.0, growth_steps=3)
    assert scales == [8, 8, 16, 8, 8, 8, 4, 4, 4, 8]


def test_each_growth_takes_n_good_steps_anew():
    assert scale_run([True] * 6, init_scale=8.0, growth_steps=2) == [8, 16, 16, 32, 32, 64]


def test_the_scale_keeps_its_bounds():
    bounds = {"init_scale": 4.0, "min_scale": 2.0, "max_scale": 8.0, "growth_steps": 1}
    assert scale_run([False] * 3 + [True] * 4, **bounds) == [2, 2, 2, 4, 8, 8, 8]


def test_scaling_saves_float16_gradients_that_would_vanish():
    scaling = DynamicLossScaleConfig(type="dynamic")
    state, w = scaling.init(), jnp.float16(1)

    def loss(w):
        return (w * jnp.float16(2e-4)) * jnp.float16(1e-4)

    assert jax.grad(loss)(w) == 0
    scaled = jax.grad(lambda w: scale_loss(loss(w), state))(w)
    np.testing.assert_allclose(unscale(scaled, state), 2e-8, rtol=2e-3)


def test_a_scale_that_overflows_backs_off_until_training_goes_on():
    scaling = DynamicLossScaleConfig(type="dynamic", init_scale=2.0**20)
    tx = safety.skip_nonfinite(optax.sgd(0.5))

    @jax.jit
    def step(w, state, scale):
        grads = jax.grad(lambda w: scale_loss(jnp.sum(jnp.square(w)), scale))(w)
        finite = safety.all_finite(grads)
        updates, state = tx.update(unscale(grads, scale), state, w)
        return optax.apply_updates(w, updates), state, scaling.update(scale, finite)

    w, scale = jnp.ones((2,), jnp.float16), scaling.init()
    state = tx.init(w)
    for _ in range(8):
        w, state, scale = step(w, state, scale)
    assert int(state.skipped) == 6  # 2 w scale is finite in float16 from 2**14 down
    assert float(scale.scale) == 2.0**14
    assert w.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_scale": 0.5}, "does not hold for 1.0, 0.5, 16777216.0"),
        ({"max_scale": float("inf")}, "max_scale\n.*finite number"),
        ({"min_scale": 0.0}, "min_scale\n.*greater than 0"),
        ({"growth": 1.0}, "growth\n.*greater than 1"),
        ({"backoff": 1.0}, "backoff\n.*less than 1"),
        ({"growth_steps": 0}, "growth_steps\n.*greater than or equal to 1"),
    ],
)
def test_loss_scales_that_cannot_work(settings, message):
    with pytest.raises(ValidationError, match=message):
        DynamicLossScaleConfig(type="dynamic", **settings)


def test_a_step_skipped_from_outside_is_counted_inside_another_s_state():
    """As where a transformation of one's own lies around what counts."""
    chained = optax.chain(optax.identity(), safety.count_skips(optax.adam(1e-3)))
    state = safety.skipped_once(chained.init(jnp.ones(2)))
    (counted,) = safety.skip_states(state)
    assert (int(counted.skipped), int(counted.consecutive), int(counted.inner[0].count)) == (
        1,
        1,
        0,
    )
