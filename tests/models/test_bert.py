"""BERT beside a plain computation of its formulas, and in the programs of several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from initialized import initialized
from pydantic import ValidationError

from jaxdist.errors import ConfigError
from jaxdist.models.bert import BertConfig
from jaxdist.models.functional import functional
from jaxdist.models.loss import classification, masked_tokens
from jaxdist.trees import tree_size

VOCAB = 99


def config(**changes):
    return BertConfig.model_validate(
        {"type": "bert", "layers": 2, "embed": 24, "heads": 3, "positions": 16, **changes}
    )


def bert(**changes):
    given = config(**changes)
    return functional(lambda rngs: given.build(rngs, vocab_size=VOCAB))


@functools.cache
def initial():
    model = bert()

    # Norms, biases and positions that start as 0 or 1 would hide where they are used.
    def draw(key):
        keys = iter(jax.random.split(key, 99))
        params = model.init(jax.random.key(0))[0]
        return jax.tree.map(lambda p: p + 0.1 * jax.random.normal(next(keys), p.shape), params)

    return jax.jit(draw)(jax.random.key(5))


def tokens(seed=1, batch=2, length=16):
    return np.asarray(jax.random.randint(jax.random.key(seed), (batch, length), 0, VOCAB))


def plain(params, tokens, segments, kinds):
    """The logits in float64, written from the paper's formulas."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def norm(x, own):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12) * own["scale"] + own["bias"]

    def gelu(x):
        from scipy.special import erf

        return x * 0.5 * (1 + erf(x / np.sqrt(2)))

    # A segment's positions are counted from its first token.
    places = [[list(row[:i]).count(number) for i, number in enumerate(row)] for row in segments]
    x = p["embedding"][tokens] + p["positions"][np.array(places)] + p["kinds"][kinds]
    x = norm(x, p["embed_norm"])
    for i in range(2):
        b = jax.tree.map(lambda leaf, i=i: leaf[i], p["blocks"])
        a = b["attention"]
        q, k, v = (
            np.einsum("bld,dhk->bhlk", x, a[name]) + a[f"{name}_bias"][None, :, None]
            for name in ("query", "key", "value")
        )
        scores = np.einsum("bhik,bhjk->bhij", q, k) / np.sqrt(q.shape[-1])
        scores[
            np.broadcast_to((segments[:, :, None] != segments[:, None])[:, None], scores.shape)
        ] = -1e30
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        y = np.einsum("bhij,bhjk,hkd->bid", weights, v, a["out"]) + a["out_bias"]
        x = norm(x + y, b["attention_norm"])
        m = b["mlp"]
        x = norm(x + gelu(x @ m["up"] + m["up_bias"]) @ m["down"] + m["down_bias"], b["mlp_norm"])
    h = norm(gelu(x @ p["transform"] + p["transform_bias"]), p["norm"])
    return (h @ p["embedding"].T + p["output_bias"])[..., :VOCAB]


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.every(2)
def test_logits_are_those_of_the_formulas(isolate):
    model, given = bert(isolate_documents=isolate), tokens()
    segments = np.sort(np.asarray(tokens(2) % 3), axis=1)
    kinds = tokens(3) % 2
    found = jax.jit(lambda p: model.bind(p, {})(given, segments, kinds))(initial())
    expected = plain(initial(), given, segments if isolate else 0 * segments, kinds)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_sizes_are_the_published_ones():
    large = config(layers=24, embed=1024, heads=16, positions=512, vocab_multiple=1)
    model = functional(lambda rngs: large.build(rngs, vocab_size=30_522))
    # 335,174,458 of the published model with its masked-language head, less its unused parts: none.
    assert tree_size(model.params) == 335_174_458


def test_a_position_sees_both_ways_and_padding_has_no_probability():
    model, given = bert(), tokens()
    run = jax.jit(lambda p, t: model.bind(p, {}).hidden(t, jnp.zeros_like(t)))
    before = run(initial(), given)
    changed = given.copy()
    changed[:, 9] = (changed[:, 9] + 1) % VOCAB
    assert (np.abs(run(initial(), changed) - before).max((0, 2)) > 0).all()
    module = model.bind(initial(), {})
    padded = jax.nn.softmax(module.padded_head(before))
    assert padded.shape[-1] == 128
    assert padded[..., VOCAB:].max() == 0


@pytest.mark.full
def test_the_loss_counts_masked_positions_alone_and_rows_by_their_weight():
    model, given = bert(), tokens()
    positions, targets = np.array([[1, 5, 9], [0, 2, 15]]), tokens(4, 2, 3)
    weight = np.array([1.0, 0.5], np.float32)
    batch = {
        "tokens": jnp.asarray(given), "segments": jnp.zeros_like(given), "weight": weight,
        "positions": jnp.asarray(positions), "targets": jnp.asarray(targets),
    }  # fmt: skip
    found = jax.jit(lambda p: masked_tokens(model.bind(p, {}), batch))(initial())
    logits = plain(initial(), given, np.zeros_like(given), np.zeros_like(given))
    chosen = np.take_along_axis(logits, positions[:, :, None], 1)
    nats = (
        np.log(np.exp(chosen).sum(-1)) - np.take_along_axis(chosen, targets[:, :, None], 2)[..., 0]
    )
    assert float(found["loss"].weight) == 4.5
    np.testing.assert_allclose(found["loss"].total, (nats * weight[:, None]).sum(), rtol=1e-4)
    hits = (chosen.argmax(-1) == targets) * weight[:, None]
    np.testing.assert_allclose(found["accuracy"].total, hits.sum())


def test_packed_documents_have_the_losses_that_they_have_alone():
    """To 1e-5, with padding at the end of the packed window and of each document's own."""
    model = bert(isolate_documents=True)
    documents = [tokens(5, 1, 6)[0], tokens(6, 1, 3)[0], tokens(7, 1, 5)[0]]
    hidden = [np.array([0, 4]), np.array([2]), np.array([1, 3])]
    run = jax.jit(lambda p, *batch: model.bind(p, {})(*batch))

    def nats(rows, numbers, places):
        logits = jax.nn.log_softmax(run(initial(), rows, numbers))
        return [-logits[row, at, target] for row, at, target in places]

    def filled(parts, fill):
        return np.concatenate([*parts, np.full(16 - sum(map(len, parts)), fill)])[None]

    numbers = [np.full(len(own), i + 1) for i, own in enumerate(documents)]
    starts = np.cumsum([0, *map(len, documents)])
    places = [(0, start + at, 7) for start, own in zip(starts, hidden, strict=False) for at in own]
    packed = nats(filled(documents, 3), filled(numbers, 0), places)
    alone = [
        loss
        for own, at in zip(documents, hidden, strict=True)
        for loss in nats(filled([own], 3), filled([1 + 0 * own], 0), [(0, i, 7) for i in at])
    ]
    np.testing.assert_allclose(packed, alone, rtol=1e-5)


@pytest.mark.full
def test_dropout_drops_in_training_alone():
    model = bert(dropout=0.5)
    given = jnp.asarray(tokens())
    params = initial()
    module = model.bind(params, {}, jax.random.key(3))
    trained = module(given)
    module.eval()
    np.testing.assert_allclose(module(given), bert().bind(params, {})(given), rtol=1e-5, atol=1e-5)
    assert np.abs(module(given) - trained).max() > 0.1


@pytest.mark.full
def test_a_classifier_reads_the_first_state_alone():
    model = functional(lambda rngs: config(head="classes").build(rngs, vocab_size=VOCAB, classes=3))
    names = {"transform", "transform_bias", "norm", "output_bias"}
    assert set(bert().params) - set(model.params) == names
    params = initialized(model)[0]
    given = jnp.asarray(tokens())
    module = model.bind(params, {})
    x_BD = module.hidden(given, jnp.zeros_like(given))[:, 0]
    pooled = jnp.tanh(x_BD @ params["pooler"]["kernel"] + params["pooler"]["bias"][None])
    last = params["classifier"]
    expected = pooled @ last["kernel"] + last["bias"][None]
    np.testing.assert_allclose(module(given), expected, rtol=1e-5, atol=1e-6)
    weight = jnp.array([1.0, 0.5])
    batch = {"tokens": given, "segments": 0 * given, "label": jnp.array([2, 0]), "weight": weight}
    found = classification(module, batch, label_smoothing=0.0)
    nats = -jax.nn.log_softmax(expected)[jnp.arange(2), batch["label"]]
    np.testing.assert_allclose(found["loss"].total, (nats * weight).sum(), rtol=1e-5)
    with pytest.raises(ConfigError, match=r"model\.head: classes needs data with classes"):
        config(head="classes").build(nnx.Rngs(0), vocab_size=VOCAB)


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValidationError, match="heads 5 must divide embed 24: use 4"):
        config(heads=5)
    with pytest.raises(ValidationError, match="scan_unroll 3 exceeds layers 2"):
        config(scan_unroll=3)
    with pytest.raises(ConfigError, match=r"32 tokens, but model\.positions is 16"):
        functional(lambda rngs: config().build(rngs, vocab_size=VOCAB, length=32))
