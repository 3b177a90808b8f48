import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxdist.errors import ConfigError
from jaxdist.optim.precision import MasterState, bf16_moments, master_weights, stochastic_round
from jaxdist.optim.safety import skip_nonfinite

BF16 = jnp.bfloat16


def bits(x):
    return np.asarray(x).tobytes()


def draws(value, count=40_000, seed=0):
    rounded = jax.jit(stochastic_round)(
        jnp.full((count,), value, jnp.float32), jax.random.key(seed)
    )
    assert rounded.dtype == BF16
    return np.asarray(rounded, np.float64)


@pytest.mark.parametrize("value", [1.001, -1.001, 1.0 + 2**-9, 3.14159, -2.7e-20, 1.23e30, 1.9999])
def test_the_mean_is_the_value_and_only_its_neighbours_are_drawn(value):
    found, exact = draws(value), float(np.float32(value))
    spacing = 2.0 ** (np.floor(np.log2(abs(exact))) - 7)
    assert len(set(found)) == 2
    assert np.abs(found - exact).max() < spacing
    share = abs(exact) / spacing % 1
    error = spacing * np.sqrt(share * (1 - share) / len(found))
    assert abs(found.mean() - exact) < 5 * error


def test_every_bfloat16_stays():
    words = jnp.arange(2**16, dtype=jnp.uint32).astype(jnp.uint16)
    values = jax.lax.bitcast_convert_type(words, BF16)
    wide = jax.lax.bitcast_convert_type(words.astype(jnp.uint32) << 16, jnp.float32)
    found = stochastic_round(wide, jax.random.key(1))
    nan = np.isnan(np.asarray(values, np.float32))
    np.testing.assert_array_equal(np.isnan(np.asarray(found, np.float32)), nan)
    assert bits(np.asarray(found)[~nan]) == bits(np.asarray(values)[~nan])


def test_beyond_the_largest_bfloat16_it_is_cut():
    largest = float(jnp.finfo(BF16).max)
    assert set(draws(3.4e38, 1000)) == {largest}
    assert set(draws(-3.4e38, 1000)) == {-largest}


def test_a_wide_nan_is_no_infinity():
    nan = jax.lax.bitcast_convert_type(jnp.uint32(0x7F800001), jnp.float32)
    assert jnp.isnan(stochastic_round(nan, jax.random.key(0)))


def decayed(narrow, steps=600):
    """A second moment of 1 after steps without gradient, over its true value."""
    tx = narrow(optax.scale_by_adam(b2=0.999))
    params = jnp.zeros((512,))
    state = tx.init(params)

    def body(state, grad):
        return tx.update(jnp.full_like(params, grad), state, params)[1], None

    grads = jnp.zeros((steps,)).at[0].set(jnp.sqrt(1000.0))
    state = jax.jit(lambda state: jax.lax.scan(body, state, grads)[0])(state)
    return np.asarray(optax.tree.get(state, "nu"), np.float64) / 0.999 ** (steps - 1)


def test_bf16_moments_follow_where_rounding_to_nearest_stands_still():
    found = decayed(bf16_moments)
    np.testing.assert_allclose(found.mean(), 1, atol=0.01)
    nearest = decayed(
        lambda inner: optax.GradientTransformationExtraArgs(
            lambda params: optax.tree.cast(inner.init(params), BF16), nearest_update(inner)
        )
    )
    assert nearest.min() > 1.5


def nearest_update(inner):
    def update(updates, state, params=None):
        wide = state._replace(
            mu=optax.tree.cast(state.mu, jnp.float32), nu=optax.tree.cast(state.nu, jnp.float32)
        )
        updates, moved = inner.update(updates, wide, params)
        return updates, moved._replace(
            count=moved.count.astype(state.count.dtype),
            mu=optax.tree.cast(moved.mu, BF16),
            nu=optax.tree.cast(moved.nu, BF16),
        )

    return update


def quadratic(tx, steps=300):
    target = jnp.linspace(-1.0, 1.0, 64)
    params = jnp.zeros_like(target)

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(params - target, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.jit(
        lambda: jax.lax.scan(body, (params, tx.init(params)), None, length=steps)
    )()
    return np.asarray(params), state


def test_adam_with_bf16_moments_goes_where_adam_goes():
    plain, _ = quadratic(optax.adam(0.01))
    found, state = quadratic(bf16_moments(optax.adam(0.01)))
    moments = optax.tree.get(state, "mu"), optax.tree.get(state, "nu")
    assert [m.dtype for m in moments] == [BF16, BF16]
    assert optax.tree.get(state.inner, "count").dtype == jnp.int32
    np.testing.assert_allclose(found, plain, atol=0.03)
    assert not np.array_equal(found, plain)


def test_noise_differs_by_leaf_step_and_seed():
    grads = {"a": jnp.full((64,), 1.0 / 3), "b": jnp.full((64,), 1.0 / 3)}

    def traces(seed):
        tx = bf16_moments(optax.trace(0.0), seed=seed)
        state, found = tx.init(grads), []
        for _ in range(2):
            _, state = tx.update(grads, state)
            found += [bits(leaf) for leaf in jax.tree.leaves(state.inner)]
        return found

    assert len(set(traces(0) + traces(1))) == 8
    assert traces(0) == traces(0)


def test_bf16_moments_under_a_mask():
    params = {"w": jnp.ones((4,)), "b": jnp.ones((2,))}
    tx = bf16_moments(optax.masked(optax.adam(0.1), {"w": True, "b": False}))
    state = tx.init(params)
    _, state = jax.jit(tx.update)(params, state, params)
    assert optax.tree.get(state, "mu")["w"].dtype == BF16


def test_moments_around_master_weights_are_refused():
    tx = bf16_moments(optax.chain(master_weights(optax.adam(0.1))))
    with pytest.raises(ConfigError, match=r"nest them as master_weights\(bf16_moments"):
        tx.init(jnp.ones((2,), BF16))


def add(update):
    """A transform that moves the master weights by `update`."""
    return optax.stateless(lambda updates, params: update)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
@example(seed=29251291)
@pytest.mark.every(2)
def test_narrow_params_are_the_rounded_master_whatever_the_update(dtype, seed):
    rng = np.random.default_rng(seed)
    exponents = (-60, 100) if dtype == BF16 else (-30, 14)

    def draw():
        return (rng.uniform(-2, 2, 1024) * 2.0 ** rng.integers(*exponents, 1024)).astype(np.float32)

    start = draw()
    # Besides updates of any size: those of the weight's own, and those that all but cancel it.
    alike = (start * rng.uniform(-2, 2, 1024)).astype(np.float32)
    cancel = -start * (1 + np.float32(2**-23) * rng.integers(-64, 64, 1024).astype(np.float32))
    update = np.choose(rng.integers(0, 3, 1024), [draw(), alike, cancel])
    params, state = narrow_step(start, update, dtype)
    found, wanted = (np.asarray(x.astype(dtype), np.float32) for x in (params, state.master))
    old = np.abs(np.asarray(jnp.asarray(start).astype(dtype), np.float32))
    edge = (old > np.abs(start)) & (np.frexp(old)[0] == 0.5)  # rounded up to a power of two
    np.testing.assert_array_equal(found[~edge], wanted[~edge])
    assert (np.abs(found - wanted)[edge] <= 2.0**-23 * old[edge]).all()


def narrow_step(start, update, dtype):
    @jax.jit
    def run(start, update):
        tx = master_weights(add(update), dtype)
        params = start.astype(dtype)
        updates, state = tx.update(jnp.zeros_like(params), tx.init(start), params)
        return optax.apply_updates(params, updates), state

    return run(start, update)


def test_training_with_master_weights_follows_float32_where_bfloat16_stands_still():
    target = jnp.linspace(0.9, 1.1, 16)

    def train(tx, params, steps=400):
        def body(carry, _):
            params, state = carry
            grads = (params.astype(jnp.float32) - target).astype(params.dtype)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.jit(
            lambda params: jax.lax.scan(body, (params, tx.init(params)), None, length=steps)[0]
        )(params)

    ones = jnp.full((16,), 2.0)
    exact, _ = train(optax.sgd(0.002), ones)
    (stuck, _), (found, state) = (
        train(tx, ones.astype(BF16)) for tx in (optax.sgd(0.002), master_weights(optax.sgd(0.002)))
    )
    assert found.dtype == BF16
    assert state.master.dtype == jnp.float32
    np.testing.assert_array_equal(found, state.master.astype(BF16))
    np.testing.assert_allclose(state.master, exact, rtol=1e-2)
    assert (np.asarray(stuck, np.float32) == 2).all()


def test_a_master_just_above_the_middle_rounds_up_once():
    start, above = np.float32(2**-24 * (1 - 2**-10)), np.float32(1 + 2**-8 + 2**-23)
    params, state = narrow_step(np.array([start]), np.array([above]), BF16)
    assert float(state.master[0]) == above
    # Without a rounding of its own, the sum in float32 would fall on the middle, and then to 1.
    assert float(params[0]) == 1 + 2**-7


def test_the_inner_transform_sees_the_master_weights():
    start = jnp.float32(1.001)
    tx = master_weights(optax.add_decayed_weights(1.0))
    _, state = tx.update(BF16(0), tx.init(start), start.astype(BF16))
    assert float(state.master) == float(2 * start)


def test_init_from_float32_keeps_the_lost_digits():
    start = jnp.float32(1.001)
    state = master_weights(optax.sgd(0.1)).init(start)
    assert float(state.master) == float(start)
    assert state.master is not start


def test_all_wrappers_together_skip_to_the_bit():
    tx = skip_nonfinite(master_weights(bf16_moments(optax.adam(0.1))))
    params = {"w": jnp.array([1.0, -0.0], BF16)}
    state, update = tx.init(params), jax.jit(tx.update)
    updates, state = update({"w": jnp.ones((2,), BF16)}, state, params)
    params = optax.apply_updates(params, updates)
    updates, after = update({"w": jnp.array([1, jnp.nan], BF16)}, state, params)
    assert bits(optax.apply_updates(params, updates)["w"]) == bits(params["w"])
    assert isinstance(after.inner, MasterState)
    assert list(map(bits, jax.tree.leaves(after.inner))) == list(
        map(bits, jax.tree.leaves(state.inner))
    )
    marked = optax.tree.map_params(tx, lambda _: 1, state, transform_non_params=lambda _: 0)
    assert sum(jax.tree.leaves(marked)) == 3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_a_dtype_that_needs_no_master(dtype):
    with pytest.raises(ConfigError, match=f"dtype {jnp.dtype(dtype)} must be bfloat16 or float16"):
        master_weights(optax.sgd(1.0), dtype)


def test_missing_and_wide_params():
    tx, params = master_weights(optax.sgd(1.0)), {"w": jnp.ones((2,))}
    state = tx.init(params)
    with pytest.raises(ConfigError, match="params is None: call update"):
        tx.update(params, state)
    with pytest.raises(ConfigError, match="dtype=bfloat16, but params are float32"):
        tx.update(params, state, params)
