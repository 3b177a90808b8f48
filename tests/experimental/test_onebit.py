"""1-bit Adam and 1-bit LAMB beside their papers' algorithms in float64 numpy, with their wire."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist.compression import (
    CompressedMomentum,
    CompressionError,
    PerParameter,
    Sender,
    Sign,
    compressed_all_reduce,
    init_state,
    warm_up,
)
from jaxdist.experimental.onebit import scale_by_frozen_adam
from jaxdist.experimental.onebit_lamb import OnebitLambRule, onebit_lamb
from jaxdist.optim.safety import skip_nonfinite

N, FREEZE, STEPS, BLOCK = 4, 5, 12, 8
B1, B2, EPS, RATE = 0.9, 0.95, 1e-6, 0.05
SIZE = 64
REACHED = np.arange(SIZE) % 9 != 4  # the others have no gradient, as rows of an embedding may
CODEC = warm_up(Sign(block=BLOCK), FREEZE)
FEEDBACK = CompressedMomentum(b1=B1)


def signs(x):
    """One bit an element and the mean of their sizes a block, as float64; scales of 8 bits."""
    blocks = x.reshape(-1, BLOCK)
    scale = np.abs(blocks).mean(1, keepdims=True)
    exponent = np.floor(np.log2(scale)) - 7
    scale = np.round(scale / 2**exponent) * 2**exponent
    return (np.where(blocks < 0, -1, 1) * scale).reshape(x.shape)


class Wire:
    """Algorithm 1's exchange: N workers, each the server of a shard, errors on both ways."""

    def __init__(self):
        self.m = np.zeros(SIZE)
        self.worker, self.server = np.zeros((N, SIZE)), np.zeros(SIZE)

    def momentum(self, gradients, compressed):
        """The next momentum of all, from each worker's gradient; its last one is kept."""
        sent = (B1 * self.m + (1 - B1) * gradients) / N
        if compressed:
            x = sent + self.worker
            shards = [signs(shard) for own in x for shard in np.split(own, N)]
            messages = np.stack(shards).reshape(N, SIZE)
            self.worker = x - messages
            y = messages.sum(0) + self.server
            message = np.concatenate([signs(shard) for shard in np.split(y, N)])
            self.server, self.m = y - message, message
        else:
            self.m = sent.sum(0)
        return self.m


def gradients(step, w):
    """Of each worker's own bowl, with noise that is its own."""
    random = np.random.default_rng(step)
    centre = np.linspace(-1, 1, SIZE)
    slope = np.geomspace(0.1, 1.0, SIZE)
    return REACHED * (slope * (w - centre) + 0.3 * random.standard_normal((N, SIZE)))


def divided(m, v):
    """By the root of v, where anything was seen."""
    return np.where(v > 0, m / (np.sqrt(v) + EPS), 0)


def adam(w, bias_correction=True, seeds=range(1, STEPS + 1)):
    """Algorithm 1 of arXiv 2102.02888."""
    wire, v, found = Wire(), np.zeros(SIZE), []
    for t, seed in enumerate(seeds, 1):
        g = gradients(seed, w)
        m = wire.momentum(g, t > FREEZE)
        if t <= FREEZE:
            v = B2 * v + (1 - B2) * g.mean(0) ** 2
        one = 1 - B1**t if bias_correction else 1
        two = 1 - B2 ** min(t, FREEZE) if bias_correction else 1
        w = w - RATE * divided(m / one, v / two)
        found.append(w)
    return found


def lamb(w, decay, rule):
    """Algorithm 1 of arXiv 2104.06069; 4 layers of 16 weights, each with a ratio of its own."""
    wire, v, fresh, found = Wire(), np.zeros(SIZE), np.zeros(SIZE), []
    mean, factor = np.zeros((4, 1)), np.ones((4, 1))

    def norms(x):
        return np.linalg.norm(x.reshape(4, -1), axis=1, keepdims=True)

    for t in range(1, STEPS + 1):
        before = wire.m
        m = wire.momentum(gradients(t, w), t > FREEZE)
        g = (m - B1 * before) / (1 - B1)  # reconstructed; the mean gradient in the warm-up
        fresh = B2 * fresh + (1 - B2) * g**2
        if t <= FREEZE:
            v = fresh
        direction = divided(m, v)
        update = direction + decay * w
        if t <= FREEZE:
            ratio = np.clip(norms(w) / norms(update), *rule.ratio_bounds)
            mean = rule.coefficient_decay * mean + (1 - rule.coefficient_decay) * ratio
        else:
            quotient = np.where(v > 0, (np.sqrt(v) + EPS) / (np.sqrt(fresh) + EPS), 0)
            next_factor = quotient.reshape(4, -1).max(1, keepdims=True)
            if decay:
                share = np.minimum(1, norms(direction) / norms(update))
                next_factor = next_factor * share + 1 - share
            next_factor = np.clip(next_factor, *rule.factor_bounds)
            change = rule.factor_change
            factor = np.clip(next_factor, factor * (1 - change), factor * (1 + change))
            ratio = mean * factor
        w = w - RATE * (ratio * update.reshape(4, -1)).ravel()
        found.append(w)
    return found


def trained(
    transform,
    shape,
    devices,
    shards=False,
    codec=CODEC,
    feedback=FEEDBACK,
    steps=STEPS,
    of=gradients,
):
    """The weights after each step of our wire and optimizer, on N devices."""
    mesh = Mesh(np.array(devices[:N]), ("data",))
    rows, whole = PartitionSpec("data"), PartitionSpec()
    w = jnp.full(shape, 0.5)
    state = init_state(w, N, codec=codec, feedback=feedback)

    @partial(
        jax.shard_map, mesh=mesh, in_specs=(rows, rows), out_specs=(whole, rows), check_vma=False
    )
    def reduce(given, state):
        own = given[0].reshape(shape) / N
        found = compressed_all_reduce(own, state, "data", codec=codec, feedback=feedback)
        return found.grads, found.state

    @jax.jit
    def step(w, given, state, opt_state):
        mean, state = reduce(given, state)
        updates, opt_state = transform.update(mean, opt_state, w)
        return optax.apply_updates(w, updates), state, opt_state

    opt_state, found = transform.init(w), []
    if shards:  # moments in shards, as ZeRO has them
        lie = NamedSharding(mesh, PartitionSpec(None, "data"))
        opt_state = jax.tree.map(
            lambda x: jax.device_put(x, lie) if x.shape == shape else x, opt_state
        )
    for t in range(1, steps + 1):
        given = jnp.asarray(of(t, np.asarray(w, np.float64).ravel()), jnp.float32)
        w, state, opt_state = step(w, given, state, opt_state)
        found.append(np.asarray(w, np.float64).ravel())
    return found


@pytest.mark.parametrize("bias_correction", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.full
def test_onebit_adam_step_by_step(devices, bias_correction):
    direction = scale_by_frozen_adam(
        B1, B2, EPS, freeze_step=FREEZE, bias_correction=bias_correction, bounded=False
    )
    found = trained(optax.chain(direction, optax.scale(-RATE)), (SIZE,), devices)
    for ours, expected in zip(found, adam(np.full(SIZE, 0.5), bias_correction), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.full
def test_a_step_that_is_left_out_of_the_warm_up_makes_it_no_shorter(devices):
    """The second moment would see a gradient that a message stands for."""

    def with_a_hole(step, w):
        g = gradients(step, w)
        return np.where(np.arange(N)[:, None] == 1, np.nan, g) if step == 3 else g

    direction = scale_by_frozen_adam(B1, B2, EPS, freeze_step=FREEZE, bounded=False)
    transform = skip_nonfinite(optax.chain(direction, optax.scale(-RATE)))
    found = trained(transform, (SIZE,), devices, of=with_a_hole)
    seeds = [t for t in range(1, STEPS + 1) if t != 3]
    np.testing.assert_array_equal(found.pop(2), found[1])
    for ours, expected in zip(found, adam(np.full(SIZE, 0.5), seeds=seeds), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("shards", "decay"),
    [
        pytest.param(False, 0.0, marks=pytest.mark.full),
        pytest.param(True, 0.0, marks=pytest.mark.full),
        pytest.param(False, 0.1, marks=pytest.mark.full),
        (True, 0.1),
    ],
)
@pytest.mark.every(2)
def test_onebit_lamb_step_by_step(devices, decay, shards):
    # Of the ratios and factors some meet each of these bounds, and others none.
    rule = OnebitLambRule(
        FREEZE,
        ratio_bounds=(0.75, 1.1),
        factor_bounds=(0.9, 1.05),
        factor_change=0.03,
        bounded=False,
    )
    transform = onebit_lamb(
        RATE, B1, B2, EPS, decay, rule=rule, layer_dims=["layers", None, None],
        decay_mask=True, adapt_mask=True,
    )  # fmt: skip
    found = trained(transform, (4, 4, 4), devices, shards)
    for ours, expected in zip(found, lamb(np.full(SIZE, 0.5), decay, rule), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=5e-4, atol=5e-5)


def pulled_apart(step, w):
    """Gradients whose signs are those of what cancels in their sum."""
    return 0.2 * (w - np.linspace(-1, 1, SIZE)) + 0.2 * np.array([[1], [-1], [1], [-1]])


@pytest.mark.slow
def test_without_feedback_the_weights_go_elsewhere(devices):
    direction = scale_by_frozen_adam(B1, B2, EPS, freeze_step=FREEZE)
    transform, error = optax.chain(direction, optax.scale(-RATE)), {}

    class Lossy(CompressedMomentum):
        def settle(self, x, decoded, memory):
            return memory

    for kind in (CompressedMomentum, Lossy):
        given = (False, warm_up(Sign(block=SIZE), FREEZE), kind(b1=B1), 300, pulled_apart)
        ends = trained(transform, (SIZE,), devices, *given)[-50:]
        error[kind] = np.abs(np.mean(ends, 0) - np.linspace(-1, 1, SIZE)).mean()

    assert error[CompressedMomentum] < 0.03
    assert error[Lossy] > 4 * error[CompressedMomentum]


def test_vectors_that_stay_whole_are_plain_gradients(devices):
    codec = PerParameter(otherwise=Sign(block=BLOCK))
    mesh = Mesh(np.array(devices[:N]), ("data",))
    w = {"w": jnp.zeros((8, 8)), "b": jnp.zeros(8)}
    state = init_state(w, N, codec=codec, feedback=FEEDBACK)
    given = np.random.default_rng(0).standard_normal((N, 8)).astype(np.float32)

    @partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec(),
             check_vma=False)  # fmt: skip
    def reduce(b, state):
        own = {"w": jnp.ones((8, 8)), "b": b[0]}
        return compressed_all_reduce(own, state, "data", codec=codec, feedback=FEEDBACK).grads

    np.testing.assert_allclose(jax.jit(reduce)(given, state)["b"], given.sum(0), rtol=1e-5)


def test_one_sender_has_no_momentum_in_common():
    with pytest.raises(
        CompressionError, match=r"that all senders share, but .*: use classic, ef21 or momentum"
    ):
        Sender(Sign(), FEEDBACK)
