"""Mixtures of experts on one device: what they compute, and what their routers measure."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pydantic import ValidationError

from jaxdist.errors import ConfigError
from jaxdist.models.feed_forward.config import ExpertsConfig
from jaxdist.models.feed_forward.mixture import Experts
from jaxdist.models.feed_forward.products import Loop, RaggedDot, choose_product
from jaxdist.models.feed_forward.router import corrected, route
from jaxdist.models.feed_forward.swiglu import ACTIVATIONS
from jaxdist.models.gpt import GptConfig
from jaxdist.models.hints import no_hint
from jaxdist.models.loss import next_token, next_token_in_chunks

T, D, F, E, K = 24, 8, 16, 5, 2


@partial(jax.jit, static_argnums=0)
def given(seed=0):
    """Tokens, distinct experts of each, weights, and kernels."""
    keys = jax.random.split(jax.random.key(seed), 6)
    ids = jax.vmap(lambda k: jax.random.permutation(k, E)[:K])(jax.random.split(keys[1], T))
    shapes = (E, D, F), (E, D, F), (E, F, D)
    kernels = [jax.random.normal(k, s) * 0.3 for k, s in zip(keys[3:], shapes, strict=True)]
    weights = jax.random.uniform(keys[2], (T, K))
    return jax.random.normal(keys[0], (T, D)), ids, weights, kernels


@jax.jit
def masked(x, ids, weights, gate, up, down):
    """Every expert for every token, and then a mask."""
    hidden = ACTIVATIONS["swiglu"](jnp.einsum("td,edf->tef", x, gate))
    every = jnp.einsum("tef,efd->ted", hidden * jnp.einsum("td,edf->tef", x, up), down)
    share = (jax.nn.one_hot(ids, len(gate)) * weights[..., None]).sum(1)
    return jnp.einsum("ted,te->td", every, share)


@jax.custom_vjp
def not_written(x, y, used):
    """NaN in the rows of y that are not used, and in the gradients of these rows of x."""
    return jnp.where(used, y, jnp.nan)


not_written.defvjp(
    lambda x, y, used: (not_written(x, y, used), (jnp.zeros_like(x), used)),
    lambda kept, grad: (
        jnp.where(kept[1], kept[0], jnp.nan), jnp.where(kept[1], grad, 0), None
    ),
)  # fmt: skip


class Undefined(RaggedDot):
    """A product that leaves the rows after the last expert's rows undefined, as megablox does."""

    def __call__(self, x_RD, w_EDF, counts_E, block):
        used_R1 = (jnp.arange(len(x_RD)) < counts_E.sum())[:, None]
        return not_written(x_RD, super().__call__(x_RD, w_EDF, counts_E, block), used_R1)


@pytest.mark.parametrize(
    "product", [Loop(), RaggedDot(), Undefined()], ids=["loop", "ragged_dot", "undefined"]
)
@pytest.mark.every(2)
def test_experts_compute_what_a_mask_over_all_experts_does(product):
    """The values and every gradient, also of copies that other devices' experts take."""
    x, ids, weights, kernels = given()
    ids = ids.at[3].set(E).at[7, 0].set(E + 2)
    compute = Experts("swiglu", product)

    def loss(of, x, weights, kernels):
        return (of(x, ids, weights, *kernels) ** 2).sum()

    def both(of):
        return jax.jit(lambda *args: jax.value_and_grad(lambda *a: loss(of, *a), (0, 1, 2))(*args))(
            x, weights, kernels
        )

    for ours, right in zip(*map(jax.tree.leaves, map(both, (compute, masked))), strict=True):
        np.testing.assert_allclose(ours, right, rtol=2e-5, atol=2e-5)


@pytest.mark.full
def test_a_loop_has_blocks_of_one_expert_each():
    """All tokens at one expert, and none at any."""
    x, _, weights, kernels = given()
    compute = jax.jit(Experts("swiglu", Loop()))
    for ids in (jnp.full((T, 1), 3), jnp.full((T, 1), E)):
        found = compute(x, ids, weights[:, :1], *kernels)
        right = masked(x, ids, weights[:, :1], *kernels)
        np.testing.assert_allclose(found, right, rtol=2e-5, atol=2e-5)


def routed(logits, weight=None, bias=None, positions=None, **settings):
    config = ExpertsConfig.model_validate({"count": logits.shape[-1], **settings})
    weight = jnp.ones(logits.shape[:2]) if weight is None else weight
    bias = jnp.zeros(config.count) if bias is None else bias
    run = jax.jit(lambda *given: route(*given[:3], config, *given[3:]))
    return run(logits, bias, weight, positions)


@pytest.mark.full
def test_softmax_weights_are_those_of_the_selected_logits():
    logits = jax.random.normal(jax.random.key(1), (2, 6, 4))
    choice, _, load = routed(logits)
    top = jax.lax.top_k(logits, 2)
    np.testing.assert_array_equal(choice.ids, top[1])
    np.testing.assert_allclose(choice.weights, jax.nn.softmax(top[0], -1), rtol=1e-5)
    np.testing.assert_array_equal(load.sum(-1), [12.0, 12.0])
    raw = routed(logits, normalize=False, top_k=1)[0].weights
    np.testing.assert_allclose(raw[..., 0], jax.nn.softmax(logits, -1).max(-1), rtol=1e-6)


@pytest.mark.full
def test_a_bias_selects_but_does_not_weigh():
    logits = jnp.array([[[2.0, 1.0, 0.0]]])
    bias = jnp.array([0.0, -5.0, 0.0])
    choice = routed(logits, bias=bias, router="sigmoid", normalize=False, scale=2.5)[0]
    np.testing.assert_array_equal(choice.ids[0, 0], [0, 2])
    scores = jax.nn.sigmoid(logits[0, 0, jnp.array([0, 2])])
    np.testing.assert_allclose(choice.weights[0, 0], 2.5 * scores, rtol=1e-6)


@pytest.mark.full
def test_no_gradient_reaches_a_bias():
    logits = jax.random.normal(jax.random.key(2), (1, 6, 4))

    def loss(bias):
        choice, sums, _ = routed(logits, bias=bias, router="sigmoid")
        return (choice.weights**2).sum() + sums.sum()

    np.testing.assert_array_equal(jax.grad(loss)(jnp.zeros(4)), jnp.zeros(4))


def test_capacity_keeps_the_first_tokens_of_each_sequence():
    """Six tokens that all choose experts 0 and 1, which take ceil(1.25 * 6 * 2 / 4) = 4 each."""
    logits = jnp.zeros((2, 6, 4)).at[..., :2].set(5.0)
    choice, sums, load = routed(logits, capacity_factor=1.25)
    np.testing.assert_array_equal(choice.ids[:, :4], jnp.broadcast_to(jnp.arange(2), (2, 4, 2)))
    np.testing.assert_array_equal(choice.ids[:, 4:], jnp.full((2, 2, 2), 4))
    np.testing.assert_array_equal(choice.weights[:, 4:], jnp.zeros((2, 2, 2)))
    np.testing.assert_allclose(sums[:, 3], [2.0, 2.0])
    np.testing.assert_allclose(load, [[6, 6, 0, 0]] * 2)  # before the drops


def test_capacity_drops_the_same_tokens_in_another_order_of_positions():
    logits = jax.random.normal(jax.random.key(5), (2, 6, 4))
    order = jnp.array([4, 0, 3, 5, 1, 2])
    alone = routed(logits, capacity_factor=0.7)
    moved = routed(logits[:, order], positions=order[None], capacity_factor=0.7)
    assert (alone[0].ids == 4).any()
    np.testing.assert_array_equal(moved[0].ids, alone[0].ids[:, order])
    np.testing.assert_allclose(moved[1], alone[1], rtol=1e-6)


@pytest.mark.full
def test_an_even_load_has_the_balance_loss_1_and_a_collapsed_one_that_of_its_experts():
    even = 20 * jax.nn.one_hot(jnp.arange(8).reshape(1, 8) % 4, 4)
    one = 20 * jax.nn.one_hot(jnp.zeros((1, 8), int), 4)
    settings = {"top_k": 1, "normalize": False}
    losses = [float(routed(x, **settings)[1][0, 0]) / 8 for x in (even, one)]
    np.testing.assert_allclose(losses, [1.0, 4.0], rtol=1e-5)


@pytest.mark.full
def test_tokens_without_weight_do_not_count_in_statistics():
    logits = jax.random.normal(jax.random.key(3), (2, 6, 4))
    weight = jnp.ones((2, 6)).at[1].set(0).at[0, 3:].set(0)
    _, sums, load = routed(logits, weight)
    _, right, right_load = routed(logits[:1, :3])
    np.testing.assert_allclose(sums[0], right[0], rtol=1e-5)
    np.testing.assert_allclose(load[0], right_load[0], rtol=1e-5)
    np.testing.assert_array_equal(sums[1], jnp.zeros(4))


def test_loads_are_whole_numbers_so_that_their_order_does_not_decide_how_a_bias_moves():
    """Three rows in which an even load is even in total, but not in each row."""
    ids = jnp.array([[0, 1, 2], [0, 1, 2], [3, 4, 5], [0, 3, 4], [1, 3, 5], [2, 4, 5]])
    logits = jnp.log(jax.nn.one_hot(ids, 6).sum(1) + 0.1).reshape(3, 2, 6)
    load = routed(logits, top_k=3)[2]
    np.testing.assert_array_equal(load, jax.nn.one_hot(ids, 6).sum(1).reshape(3, 2, 6).sum(1))
    np.testing.assert_array_equal(corrected(jnp.zeros(6), load.sum(0), 0.01), jnp.zeros(6))


def test_a_bias_moves_by_its_rate_towards_an_even_load():
    load = jnp.array([[4.0, 0.0, 2.0], [2.0, 2.0, 2.0]])
    found = corrected(jnp.full((2, 3), 0.1), load, 0.01)
    np.testing.assert_allclose(found, [[0.09, 0.11, 0.1], [0.1, 0.1, 0.1]], rtol=1e-6)


def model(**experts):
    settings = {"type": "gpt", "layers": 2, "embed": 8, "heads": 2, "mlp": 8}
    config = GptConfig.model_validate({**settings, "experts": {"count": 4, **experts}})
    return config.build(nnx.Rngs(0), vocab_size=31)


def batch(rows=3, length=8):
    tokens = jax.random.randint(jax.random.key(5), (rows, length + 1), 0, 31)
    weight = jnp.arange(rows, dtype=jnp.float32)
    return {"tokens": tokens, "segments": tokens[:, :-1] * 0, "weight": weight}


@pytest.mark.full
def test_the_loss_has_what_routers_add_only_in_training():
    module = model(balance_loss=0.5, z_loss=0.25)
    module.train()
    sums = next_token(module, batch())
    mean = {name: sum_.total / sum_.weight for name, sum_ in sums.items()}
    layers = 2
    added = layers * (0.5 * mean["balance_loss"] + 0.25 * mean["z_loss"])
    np.testing.assert_allclose(mean["loss"], mean["cross_entropy"] + added, rtol=1e-6)
    np.testing.assert_allclose(mean["expert_load"].sum(-1), [1, 1], rtol=1e-6)
    module.eval()
    np.testing.assert_array_equal(
        next_token(module, batch())["loss"].total, sums["cross_entropy"].total
    )


@pytest.mark.slow
def test_losses_of_two_parts_of_a_batch_add_up():
    module, whole = model(capacity_factor=1.0, shared=1), batch()
    parts = [{name: x[i] for name, x in whole.items()} for i in (slice(0, 1), slice(1, 3))]
    added = jax.tree.map(jnp.add, *(next_token(module, part) for part in parts))
    for ours, right in zip(*map(jax.tree.leaves, (added, next_token(module, whole))), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_chunks_of_the_loss_leave_it_as_it_is():
    module = model(every=2)
    ours, right = next_token_in_chunks(module, batch(), chunks=4), next_token(module, batch())
    assert ours.keys() == right.keys()
    np.testing.assert_allclose(ours["loss"].total, right["loss"].total, rtol=1e-6)


@pytest.mark.full
def test_experts_are_in_every_nth_block():
    assert model(every=2).blocks.mlp.up.shape == (1, 4, 8, 8)
    assert model(every=2).blocks.before[0].mlp.up.shape == (1, 8, 8)
    assert model().blocks.mlp.up.shape == (2, 4, 8, 8)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({"count": 4, "top_k": 5}, "top_k 5 exceeds the number of experts: use top_k 4"),
        ({"count": 4, "capacity_factor": 0.4}, "capacity_factor 0.4 drops most .* use 0.5 or"),
        ({"count": 4, "top_k": 1}, "set normalize: false"),
        ({"count": 4, "every": 3}, "experts.every 3 must divide layers 4: use 2"),
    ],
)
def test_bad_experts_are_refused_with_a_remedy(experts, message):
    settings = {"type": "gpt", "layers": 4, "embed": 8, "heads": 2}
    with pytest.raises(ValidationError, match=message):
        GptConfig.model_validate({**settings, "experts": experts})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"biases": "all"}, "experts have no biases"),
        ({"remat": ("full", "none"), "experts": {"count": 4, "every": 2}}, "use a single policy"),
    ],
)
def test_options_that_experts_do_not_have_are_refused(more, message):
    settings = {"type": "gpt", "layers": 4, "embed": 8, "heads": 2, "experts": {"count": 4}}
    with pytest.raises(ValidationError, match=message):
        GptConfig.model_validate({**settings, **more})


def test_the_product_is_chosen_by_the_platform_and_the_widths():
    chosen = [("cpu", 128, 256), ("tpu", 128, 256), ("tpu", 64, 256), ("gpu", 128, 128)]
    names = [type(choose_product("auto", *of)).__name__ for of in chosen]
    assert names == ["Loop", "Megablox", "RaggedDot", "RaggedDot"]
    with pytest.raises(
        ConfigError, match=r"megablox: the product runs only on TPUs, but .* is cpu"
    ):
        choose_product("megablox", "cpu", 128)
    with pytest.raises(ConfigError, match="megablox: the tiles of 128 do not divide the widths 64"):
        choose_product("megablox", "tpu", 64)


@pytest.mark.full
def test_without_a_mesh_all_experts_are_here():
    x, ids, weights, kernels = given()
    found = no_hint.over_experts(
        Experts("swiglu", Loop()), x[None], ids[None], weights[None],
        *(((None,) * 3, kernel) for kernel in kernels), capacity=None,
    )  # fmt: skip
    np.testing.assert_allclose(found[0], masked(x, ids, weights, *kernels), rtol=2e-5, atol=2e-5)
