"""The scan that fetches ahead: values and gradients of the plain one, and what it keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal, jaxprs_in_params

from jaxdist.models.ahead import scan_ahead


def fetch(layer):
    return {"w": 2 * layer["half"], "kept": layer["kept"], "count": layer["count"]}


def block(params, x, shift, mask):
    grown = jnp.tanh(x @ params["w"] + params["kept"][None] * params["count"])
    return jnp.where(mask, grown, x) + shift


def given(layers):
    rng = np.random.default_rng(0)
    stacked = {
        "half": jnp.asarray(rng.normal(size=(layers, 6, 6)), jnp.float32),
        "kept": jnp.asarray(rng.normal(size=(layers, 6)), jnp.float32),
        "count": jnp.arange(layers),
    }
    x = jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)
    shift = jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)
    return stacked, x, shift, jnp.asarray(rng.random((4, 6)) < 0.7)


def plainly(stacked, x, shift, mask):
    return jax.lax.scan(lambda x, layer: (block(fetch(layer), x, shift, mask), None), x, stacked)[0]


def ahead(stacked, x, shift, mask):
    return scan_ahead(block, fetch, stacked, x, (shift, mask))


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_values_and_gradients_are_those_of_the_plain_scan(layers):
    stacked, x, shift, mask = given(layers)

    def gradients(run):
        def loss(floats, x, shift):
            return jnp.sum(jnp.sin(run({**stacked, **floats}, x, shift, mask)))

        floats = {name: stacked[name] for name in ("half", "kept")}
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(floats, x, shift)

    expected, found = gradients(plainly), gradients(ahead)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


def test_every_layer_is_fetched_twice_and_none_is_kept():
    stacked, x, shift, mask = given(5)
    fetched = []

    def counted(layer):
        jax.debug.callback(lambda count: fetched.append(int(count)), layer["count"])
        return fetch(layer)

    def loss(half):
        layers = {**stacked, "half": half}
        return jnp.sum(scan_ahead(block, counted, layers, x, (shift, mask)))

    jax.block_until_ready(jax.grad(loss)(stacked["half"]))
    jax.effects_barrier()
    text = str(jax.make_jaxpr(lambda half: jax.vjp(loss, half)[1](1.0))(stacked["half"]))
    assert sorted(set(fetched)) == [0, 1, 2, 3, 4]
    # The forward loop leaves the inputs of layers, and no fetched weights.
    assert "f32[4,4,6]" in text
    assert "f32[4,6,6]" not in text


def loops(jaxpr):
    """The bodies of all scans."""
    for eqn in jaxpr.eqns:
        for inner in jaxprs_in_params(eqn.params):
            if eqn.primitive.name == "scan":
                yield inner
            yield from loops(inner)


def test_no_layer_waits_for_what_its_own_turn_fetches():
    stacked, x, shift, mask = given(5)

    def fetch_by_sinh(layer):
        return fetch({**layer, "half": jnp.sinh(layer["half"])})

    def loss(half):
        layers = {**stacked, "half": half}
        return jnp.sum(scan_ahead(block, fetch_by_sinh, layers, x, (shift, mask)))

    bodies = list(loops(jax.make_jaxpr(jax.grad(loss))(stacked["half"]).jaxpr))
    assert len(bodies) == 2
    for body in bodies:
        fetched = set()
        for eqn in body.eqns:
            held = {var for var in eqn.invars if not isinstance(var, Literal)}
            if eqn.primitive.name == "sinh" or held & fetched:
                assert not any(name in str(eqn) for name in ("dot_general", "tanh"))
                fetched |= set(eqn.outvars)
        assert fetched & set(body.outvars)
