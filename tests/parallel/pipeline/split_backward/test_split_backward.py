import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipeline_models import MODELS, alone, batch, on_mesh

from jaxdist.hlo import ledger
from jaxdist.jaxprs import depends_on
from jaxdist.parallel.pipeline.executor.model_fns import Visit
from jaxdist.parallel.pipeline.executor.residuals import find_residuals
from jaxdist.parallel.pipeline.split_backward.split import split_function


def flops(function, *args):
    compiled = jax.jit(function).lower(*args).compile()
    return ledger(compiled, on_mesh({"data": 1}).mesh).flops_high


def case(name):
    """A model's residuals, and the arguments of its backward pass."""
    parts = MODELS[name]()[0]
    (layers, shared), _ = alone(name, 1)
    visit = Visit(jax.tree.map(lambda leaf: leaf[0], batch(1)), jnp.int32(0), None)
    x = parts.embed(shared, visit)
    residuals = find_residuals(parts.blocks, layers, visit, x)
    y, listed = jax.jit(residuals.forward)(layers, visit, x)
    dy = jax.random.normal(jax.random.key(1), y.shape)
    pull = jax.jit(jax.vjp(lambda layers, x: parts.blocks(layers, x, visit), layers, x)[1])

    def backward(at_hand, given):
        (layers, visit), (listed, dy) = at_hand, given
        grads, dx = residuals.backward(layers, visit, listed)(dy)
        return dx, grads

    forward = flops(lambda layers, x: parts.blocks(layers, x, visit), layers, x)
    return residuals, backward, ((layers, visit), (listed, dy)), pull(dy), forward


@pytest.mark.parametrize("name", ["mlp", "mlp dots"])
@pytest.mark.every(2)
def test_both_halves_give_what_the_whole_gives_and_no_work_is_done_twice(name):
    _, backward, args, (grads, dx), forward = case(name)
    halves = split_function(backward, *args)
    found, kept = jax.jit(halves.b)(*args)
    assert [(k.shape, k.dtype) for k in kept] == [(k.shape, k.dtype) for k in halves.kept]
    same = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6 * np.abs(b).max(), rtol=0)  # noqa: E731
    jax.tree.map(same, (found, jax.jit(halves.w)(args[0], kept)), (dx, grads))
    first, second = flops(halves.b, *args), flops(halves.w, args[0], kept)
    assert first + second == flops(backward, *args)
    # Weights cost one more product for each of the forward pass's with them.
    assert first == pytest.approx(forward, rel=0.15)
    assert second == pytest.approx(forward, rel=0.15)


def test_residuals_are_what_depends_on_the_input_and_nothing_is_computed_again():
    residuals, backward, ((layers, visit), given), _, forward = case("mlp")
    moved = jax.tree.map(lambda s: jnp.linspace(-1, 1, s.size).reshape(s.shape), residuals.x)
    for before, after in zip(given[0], residuals.forward(layers, visit, moved)[1], strict=True):
        assert not np.array_equal(before, after)
    assert 0 < sum(residuals.listed) < len(residuals.listed)
    assert flops(backward, (layers, visit), given) == 2 * forward


def test_parameters_that_are_cast_or_reshaped_are_not_residuals():
    def blocks(params, x, visit):
        def layer(x, weights):
            return jnp.tanh(x @ weights.astype(jnp.bfloat16).reshape(8, 8)).astype(x.dtype), None

        return jax.lax.scan(layer, x, params)[0]

    params, x = jnp.ones((3, 4, 2, 8)), jnp.ones((5, 8), jnp.bfloat16)
    found = find_residuals(blocks, params, None, x)
    assert {shape.shape for shape in found.shapes} == {(3, 5, 8)}


@pytest.mark.full
def test_a_loop_that_shares_a_weight_between_its_turns_is_split():
    """Its gradient is a sum over the turns: a carry of the second loop alone."""

    def function(weight, given):
        x, dy = given

        def turns(weight, x):
            return jax.lax.scan(lambda x, _: (jnp.sin(x @ weight), None), x, None, length=3)[0]

        grads, dx = jax.vjp(turns, weight, x)[1](dy)
        return dx, grads

    key = jax.random.split(jax.random.key(0), 3)
    weight, x, dy = (jax.random.normal(k, (4, 4)) for k in key)
    halves = split_function(function, weight, (x, dy))
    found, kept = halves.b(weight, (x, dy))
    expected = function(weight, (x, dy))
    for a, b in zip((found, halves.w(weight, kept)), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    assert flops(halves.w, weight, kept) == 3 * 2 * 4**3


def test_results_may_be_constants_arguments_or_wanted_in_both_halves():
    def function(at_hand, given):
        x, y = given
        z = jnp.sin(x * at_hand)
        return (1.0, z), (2.0, y, z, jnp.cos(z), at_hand * 2)

    args = (jnp.float32(3), (jnp.float32(4), jnp.float32(5)))
    halves = split_function(function, *args)
    found, kept = halves.b(*args)
    assert len(kept) == 2
    assert (found, halves.w(args[0], kept)) == function(*args)


def test_dependence_is_followed_into_loops_calls_and_conditionals():
    def function(a, b):
        def turn(carry, own):
            return (carry[0] + a, carry[1] * own), own

        (first, second), third = jax.lax.scan(turn, (1.0, 1.0), b)
        called = jax.jit(lambda p, q: (p, q * 2))(a, second)
        chosen = jax.lax.cond(a > 0, lambda: (a, second), lambda: (a + 1, 0.0))
        return first, second, third, *called, *jax.checkpoint(lambda q: (q,))(a), *chosen

    traced = jax.make_jaxpr(function)(1.0, jnp.ones(3)).jaxpr
    assert depends_on(traced, [False, True]) == [0, 1, 1, 0, 1, 0, 0, 1]
    assert depends_on(traced, [True, False]) == [1, 0, 0, 1, 0, 1, 1, 1]


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


def test_dependence_is_followed_into_a_rematerialised_call_of_a_custom_derivative():
    def layers(w, x):
        return jax.lax.scan(lambda x, w: (sine(w * x), None), x, w)[0]

    def forward_and_backward(w, x, dy):
        y, pull = jax.vjp(jax.checkpoint(layers), w, x)
        return y, *pull(dy)

    traced = jax.make_jaxpr(forward_and_backward)(jnp.ones(3), 1.0, 1.0).jaxpr
    # Blockwise attention is such a function, and `remat: full` such a call.
    assert "call_jaxpr" in {name for e in traced.eqns for name in e.params}
    assert depends_on(traced, [False, False, True]) == [0, 1, 1]
    assert depends_on(traced, [False, True, False]) == [1, 1, 1]
