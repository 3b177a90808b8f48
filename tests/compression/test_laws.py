"""Laws that every codec and every feedback obeys, on arrays that are drawn at random."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.compression import (
    Adaptive,
    Cast,
    Chain,
    Ef21,
    ErrorFeedback,
    LowRank,
    MomentumCorrection,
    NoFeedback,
    Quantize,
    RandomK,
    Sender,
    Sign,
    TopK,
    WholeCodec,
    first_round,
)
from jaxdist.compression.codecs import build
from jaxdist.trees import tree_bytes

SEED = 17
CODECS = (
    WholeCodec(),
    Cast(),
    Cast(dtype="float16"),
    Cast(dtype="float8_e4m3"),
    Cast(dtype="float8_e5m2"),
    Quantize(),
    Quantize(bits=4, block=64),
    Adaptive(bits=2.5, block=64),
    Sign(block=64),
    TopK(fraction=0.1),
    TopK(fraction=0.1, method="exact"),
    RandomK(fraction=0.2),
    LowRank(rank=2),
    Chain(first=TopK(fraction=0.2), then=Quantize(bits=4, block=8)),
    Chain(first=RandomK(fraction=0.2), then=Sign(block=8)),
)
STANDS_FOR_ALL = (Quantize, Sign, TopK, LowRank, Chain)
"""Their laws are checked each time; those of the others with `-m full`."""
PARAMS = [
    pytest.param(codec, marks=() if isinstance(codec, STANDS_FOR_ALL) else pytest.mark.full)
    for codec in CODECS
]
SHAPES = ((1,), (33, 5), (3, 4, 30), (12289,))


def label(codec):
    words = [str(v) for k, v in codec.model_dump().items() if isinstance(v, str) and k != "type"]
    return "-".join([codec.type, *words])


def drawn(random, shape, dtype):
    """Elements of many sizes, some of them zero."""
    x = random.standard_normal(shape) * 10.0 ** random.uniform(-6, 3, shape)
    x = np.where(random.random(shape) < 0.1, 0.0, x)
    return jnp.asarray(x, dtype)


def cases(codec):
    """One of each shape that the codec takes, in alternating dtypes."""
    random = np.random.default_rng(SEED)
    for number, shape in enumerate(SHAPES):
        if not isinstance(codec, LowRank) or len(shape) > 1:
            yield drawn(random, shape, ("float32", "bfloat16")[number % 2])


def assert_exact_sum(total, *arrays):
    """Elements are to the bit the sums of the arrays': `fsum` rounds no difference to zero."""
    arrays = -np.asarray(total, np.float64), *arrays
    columns = (np.asarray(a, np.float64).ravel().tolist() for a in arrays)
    assert not any(map(math.fsum, zip(*columns, strict=True)))


def test_the_table_has_every_codec_of_the_config():
    kinds = {type(codec) for codec in CODECS}
    assert kinds == set(build.CodecConfig.__origin__.__args__)


@pytest.mark.parametrize("codec", PARAMS, ids=label)
@pytest.mark.every(3)
def test_what_is_decoded_and_the_residual_are_x_to_the_bit(codec):
    sender = Sender(codec)
    encode = jax.jit(sender.encode)
    decode = jax.jit(codec.decode, static_argnums=1)
    for x in cases(codec):
        like, state = jax.ShapeDtypeStruct(x.shape, x.dtype), sender.init(x)
        for step in range(2):
            corrected, _ = sender.feedback.correct(x, state.memory)
            sent = encode(x, state, first_round(step=step))
            state = sent.state
            decoded = decode(sent.message, like, first_round(step=step))
            np.testing.assert_array_equal(decoded, sent.decoded)
            assert_exact_sum(corrected, decoded, *state.memory.values())
            assert len(state.memory) == 2 - codec.exact
            if codec.exact:
                total = decoded + state.memory["residual"]
                np.testing.assert_array_equal(total, corrected)
            assert bool(sent.finite)


@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_messages_are_unsigned_integers_of_the_stated_bytes(codec):
    for x in cases(codec):
        message, _ = jax.eval_shape(codec.encode, x, codec.init(x), first_round())
        assert all(
            jnp.issubdtype(leaf.dtype, jnp.unsignedinteger) for leaf in jax.tree.leaves(message)
        )
        assert tree_bytes(message) == codec.wire_bytes(x)


@pytest.mark.parametrize("codec", PARAMS, ids=label)
def test_estimates_of_ef21_are_the_running_sum_of_messages(codec):
    random = np.random.default_rng(SEED)
    sender = Sender(codec, Ef21())
    encode, receive = jax.jit(sender.encode), jax.jit(sender.receive, static_argnums=2)
    like = jax.ShapeDtypeStruct((24, 30), jnp.float32)
    state, view, total = sender.init(like), sender.feedback.view(like), np.zeros(like.shape, "f")
    for step in range(4):
        gradient = drawn(random, like.shape, like.dtype)
        sent = encode(gradient, state, first_round(step=step))
        state = sent.state
        estimate, view = receive(sent.message, view, like, first_round(step=step))
        total = total + np.asarray(sent.decoded)
        np.testing.assert_array_equal(estimate, total)
        np.testing.assert_array_equal(state.memory["estimate"], total)


FEEDBACKS = (ErrorFeedback(), Ef21(), MomentumCorrection(), NoFeedback())


@pytest.mark.parametrize(
    ("codec", "feedback"),
    [(Sign(block=64), feedback) for feedback in FEEDBACKS]
    + [(codec, FEEDBACKS[i % 4]) for i, codec in enumerate(CODECS)],
    ids=lambda value: getattr(value, "type", None),
)
@pytest.mark.every(3)
def test_nothing_that_is_not_finite_reaches_a_memory(codec, feedback):
    sender = Sender(codec, feedback)
    x = jnp.ones((24, 30))
    encode = jax.jit(sender.encode)
    state = encode(x, sender.init(x), first_round()).state
    for step, bad in enumerate((np.nan, np.inf, -np.inf), start=1):
        sent = encode(x.at[3, 4].set(bad), state, first_round(step=step))
        assert not bool(sent.finite)
        assert int(sent.state.skipped) == step
        jax.tree.map(np.testing.assert_array_equal, sent.state[:2], state[:2])
        state = sent.state
    assert bool(encode(x, state, first_round(step=4)).finite)
