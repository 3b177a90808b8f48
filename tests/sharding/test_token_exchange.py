"""Exchanges of tokens with experts on other devices: one device's numbers, the formula's bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import experts
from jaxdist.errors import ShardingError
from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.models.feed_forward.config import ExpertsConfig
from jaxdist.models.feed_forward.mixture import INTO, OUT, Experts
from jaxdist.models.feed_forward.products import Loop
from jaxdist.models.hints import no_hint
from jaxdist.sharding import ShardingConfig, make_layout
from jaxdist.sharding.experts import choose_exchange, most_sent

B, L, D, F, E, K = 8, 4, 16, 8, 8, 2


def layout_on(exchange="auto", rules=(), **sizes):
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    mesh = build_mesh(MeshConfig.model_validate(sizes), devices)
    return make_layout(ShardingConfig(experts=exchange, rules=dict(rules)), mesh)


def given(capacity=None):
    """Tokens, experts (with dropped copies where there is a capacity), weights, and kernels."""
    keys = jax.random.split(jax.random.key(0), 6)
    of_tokens = jax.random.split(keys[1], B * L)
    ids = jax.vmap(lambda k: jax.random.permutation(k, E)[:K])(of_tokens).reshape(B, L, K)
    if capacity is not None:
        chosen = jax.nn.one_hot(ids, E, dtype=jnp.int32).sum(2)
        before = jnp.take_along_axis(jnp.cumsum(chosen, 1) - chosen, ids, -1)
        ids = jnp.where(before < capacity, ids, E)
    x, weights = jax.random.normal(keys[0], (B, L, D)), jax.random.uniform(keys[2], (B, L, K))
    shapes = (E, D, F), (E, D, F), (E, F, D)
    kernels = [jax.random.normal(k, s) * 0.3 for k, s in zip(keys[3:], shapes, strict=True)]
    return x, ids, jnp.where(ids < E, weights, 0), kernels


def gradients(hint, capacity=None):
    """The result of all experts, and the gradients of tokens, weights and kernels."""
    x, ids, weights, kernels = given(capacity)

    def loss(x, weights, kernels):
        pairs = zip((INTO, INTO, OUT), kernels, strict=True)
        compute = Experts("swiglu", Loop())
        y = hint.over_experts(compute, x, ids, weights, *pairs, capacity=capacity)
        return (y**2).sum(), y

    compiled = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True)).lower(x, weights, kernels).compile()
    return compiled(x, weights, kernels), compiled


CASES = [
    pytest.param({"data": 2, "expert": 2}, "padded", None, marks=pytest.mark.full),
    ({"data": 2, "expert": 2}, "padded", 1),
    pytest.param({"expert": 4}, "ring", None, marks=pytest.mark.full),
    ({"expert": 2, "tensor": 2}, "ring", 1),
    ({"data": 4}, "auto", None),
]


@pytest.mark.parametrize(("sizes", "exchange", "capacity"), CASES)
@pytest.mark.every(3)
def test_all_exchanges_give_the_numbers_of_one_device(sizes, exchange, capacity):
    right, _ = gradients(no_hint, capacity)
    ours, _ = gradients(layout_on(exchange, **sizes), capacity)
    for one, other in zip(*map(jax.tree.leaves, (ours, right)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("sizes", "axis"),
    [
        ({"data": 4}, "data"),
        pytest.param({"data": 2, "context": 2}, "context", marks=pytest.mark.full),
        pytest.param({"tensor": 2, "data": 2}, "tensor", marks=pytest.mark.full),
    ],
)
def test_a_rule_may_split_the_width_of_the_model(sizes, axis):
    """Each device computes its experts with whole kernels, not with its parts of them."""
    right, _ = gradients(no_hint)
    ours, _ = gradients(layout_on(rules={"embed": axis}, **sizes))
    for one, other in zip(*map(jax.tree.leaves, (ours, right)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def ragged_elsewhere(x, into, starts, sizes, places, received, *, axis_name):
    """What jax documents of `ragged_all_to_all`, for XLA on CPU, which has none."""
    del received
    me, count = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    every = [jax.lax.all_gather(a, axis_name) for a in (x, starts, sizes, places)]
    for sender in range(count):
        rows, begin, size, place = (a[sender] for a in every)
        number = jnp.arange(len(into)) - place[me]
        here = (number >= 0) & (number < size[me])
        sent = rows[jnp.clip(number + begin[me], 0, len(rows) - 1)]
        into = jnp.where(here.reshape(-1, *(1,) * (x.ndim - 1)), sent, into)
    return into


@pytest.mark.full
def test_ragged_sends_what_its_contract_says(monkeypatch):
    monkeypatch.setattr("jax.lax.ragged_all_to_all", ragged_elsewhere)
    right, _ = gradients(no_hint)
    ours, _ = gradients(layout_on("ragged", expert=2))
    for one, other in zip(*map(jax.tree.leaves, (ours, right)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("devices", "case"),
    [
        (2, ("padded", None)),
        (4, ("padded", 1.25)),
        (4, ("ring", None)),
        *(pytest.param(8, case, marks=pytest.mark.full) for case in experts.CASES),
    ],
)
@pytest.mark.every(3)
def test_a_device_sends_the_bytes_of_the_formula(devices, case):
    """With the capacity factor, within 2%, from the compiled program of both passes."""
    exchange, factor = case
    capacity = ExpertsConfig(count=experts.COUNT, capacity_factor=factor).capacity(experts.LENGTH)
    ours = experts.sent(devices, exchange, capacity)
    assert ours == pytest.approx(experts.bytes_of(devices, exchange, capacity), rel=0.02)


def test_the_exchange_that_sends_least_is_chosen():
    """Capacity leaves less than all tokens to send; without it, a ring needs no buffers."""
    tokens, rows, here = 64, 2, 2
    dropless = most_sent(tokens, rows, None, here)
    assert choose_exchange("auto", tokens, dropless, 4, 2, "cpu") == "ring"
    assert choose_exchange("auto", tokens, dropless, 4, 2, "tpu") == "ragged"
    assert (
        choose_exchange("auto", tokens, most_sent(tokens, rows, 8, here), 4, 2, "cpu") == "padded"
    )
    assert choose_exchange("padded", tokens, dropless, 4, 2, "cpu") == "padded"


def test_the_batch_is_split_over_the_axis_of_experts_too():
    layout = layout_on(data=2, expert=2)
    assert layout.spec(("batch", "seq")) == P(("data", "expert"), None)
    assert layout.data_size == 4
    assert layout.spec(INTO) == P("expert", None, None)


def test_experts_that_do_not_divide_are_refused():
    problem = layout_on(expert=4).problem("blocks/mlp/up", (6, 8, 8), INTO)
    assert "length 6 does not divide over mesh axis 'expert' of size 4" in problem
    assert "use a size of 'expert' that divides 6 (2, 3, 6)" in problem


def test_experts_on_an_axis_that_does_not_split_the_batch_are_refused():
    with pytest.raises(ShardingError, match=r"set sharding.rules.experts: expert"):
        layout_on(rules={"experts": "tensor", "mlp": None}, data=2, tensor=2)
