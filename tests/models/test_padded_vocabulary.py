"""Padding of the vocabulary has no probability: a run equals one whose table is not padded."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipeline_configs import GPT, TOKENS, drawn, experiment, trained

from jaxdist.models.functional import functional
from jaxdist.models.gpt import GptConfig
from jaxdist.models.loss import Mean, NextTokenConfig
from jaxdist.train.generate import Generator
from jaxdist.train.sampling import Sampling

VOCAB, WIDE = 13, 64
DATA = {**TOKENS, "vocab_size": VOCAB}
OWN_LOSS = {"type": "import", "path": "test_padded_vocabulary:smoothed"}
LAMB = {"type": "lamb", "learning_rate": 1e-2, "weight_decay": 0.1}
full = partial(pytest.param, marks=pytest.mark.full)
slow = partial(pytest.param, marks=pytest.mark.slow)


def smoothed(module, batch):
    """A user's loss that gives every logit some of the target, and so sees all of them."""
    logits = module(batch["tokens"][:, :-1], batch["segments"])
    assert logits.shape[-1] == VOCAB
    target = 0.9 * jax.nn.one_hot(batch["tokens"][:, 1:], VOCAB) + 0.1 / VOCAB
    nats = -(target * jax.nn.log_softmax(logits)).sum(-1).mean(-1)
    return {"loss": Mean((nats * batch["weight"]).sum(), batch["weight"].sum())}


def model_of(multiple, **settings):
    config = GptConfig(
        type="gpt", layers=1, embed=16, heads=2, mlp=16, vocab_multiple=multiple, **settings
    )
    return functional(lambda rngs: config.build(rngs, vocab_size=VOCAB))


@pytest.mark.parametrize(("tied", "chunks"), [(True, 2), (False, 1), slow(True, 1), slow(False, 2)])
@pytest.mark.every(2)
def test_loss_and_gradients_are_those_of_a_table_without_padding(tied, chunks):
    """The weights are drawn equal, too; padding is zero, and its gradient is."""
    batch = {
        "tokens": jax.random.randint(jax.random.key(1), (2, 9), 0, VOCAB),
        "segments": jnp.zeros((2, 8), jnp.int32),
        "weight": jnp.ones(2),
    }
    loss, found = NextTokenConfig(type="next_token", chunks=chunks).build(), []
    for multiple in (1, WIDE):
        model = model_of(multiple, tied_head=tied)
        params, _ = model.init(jax.random.key(0))

        def total(params, model=model):
            return loss(model.bind(params, {}), batch)["loss"].total

        value, grads = jax.jit(jax.value_and_grad(total))(params)
        for tree in (params, grads):
            tables = {"embedding": tree["embedding"]}
            tables |= {} if tied else {"output": tree["output"].T}
            assert {len(table) for table in tables.values()} == {max(VOCAB, multiple)}
            assert not any(table[VOCAB:].any() for table in tables.values())
            tree |= {name: table[:VOCAB] for name, table in tables.items()}
        found.append((value, params, grads))
    for ours, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.every(2)
def test_a_model_gives_as_many_logits_as_there_are_tokens(dtype):
    model = model_of(WIDE, compute_dtype=dtype)
    params, _ = model.init(jax.random.key(0))
    tokens = jnp.zeros((1, 4), jnp.int32)
    module = model.bind(params, {})
    padded = module.padded_head(module.hidden(tokens))
    assert module(tokens).shape == (1, 4, VOCAB)
    assert padded.shape == (1, 4, WIDE)
    mass = jax.nn.softmax(padded.astype(jnp.float32))[..., VOCAB:]
    np.testing.assert_array_equal(mass, 0)


@cache
def plain(own_loss):
    """What one device trains without padding, and the weights that it draws."""
    one = of({"data": 1}, own_loss=own_loss, multiple=1)
    begun = drawn(one)
    return begun, *trained(one, begun)


def of(mesh, parallel=None, *, own_loss, multiple=WIDE, **train):
    loss = OWN_LOSS if own_loss else None
    model = {**GPT, "layers": 2, "vocab_multiple": multiple}
    return experiment(mesh, parallel, model=model, data=DATA, loss=loss, optim=LAMB, **train)


@pytest.mark.parametrize(
    ("mesh", "own_loss"),
    [
        slow({"tensor": 4}, False),
        slow({"tensor": 4}, True),
        slow({"data": 1}, False),
        slow({"stage": 2, "tensor": 2}, False),
        full({"stage": 2, "tensor": 2}, True),
        slow({"data": 2, "stage": 2}, True),
    ],
    ids=str,
)
@pytest.mark.slow
def test_a_padded_run_is_that_of_a_table_without_padding(mesh, own_loss):
    """LAMB's norms and weight decay included; the padding is still zero at the end."""
    begun, losses, params = plain(own_loss)
    made = of(mesh, own_loss=own_loss)
    wide = jax.device_get(made.program.home.used(made.program.init()).params)
    np.testing.assert_array_equal(wide["embedding"][:VOCAB], begun.params["embedding"])
    found = trained(made)
    np.testing.assert_allclose(found[0], losses, rtol=1e-5)
    assert not found[1]["embedding"][VOCAB:].any()
    found[1]["embedding"] = found[1]["embedding"][:VOCAB]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-4), found[1], params)


@pytest.mark.full
def test_text_has_no_padding_in_it():
    """At a temperature at which all tokens are alike."""
    made = of({"data": 1}, own_loss=False)
    state = made.program.init()
    given = {"prompts": [[1]], "count": 40, "sampling": Sampling(temperature=1e6)}
    text = Generator(made.program, 8, WIDE)(state.params, {}, **given)[0]
    assert max(text.tokens) < VOCAB
