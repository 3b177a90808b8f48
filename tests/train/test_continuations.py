"""Continuations with a cache of keys and values, and by whole windows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from pipeline_configs import TOKENS, experiment

from jaxdist.train import decode
from jaxdist.train.generate import Generator
from jaxdist.train.sampling import Sampling
from jaxdist.trees import flatten_with_names

GPT = {"type": "gpt", "layers": 2, "embed": 16, "heads": 4, "kv_heads": 2}
FAMILIES = {
    "window": {"attention_window": 5, "tied_head": False},
    "gpt2": {"norm": "layer", "positions": 16, "mlp_type": "gelu", "biases": "all"},
    "qwen3": {"qk_norm": True, "biases": "qkv", "head_size": 8},
    "gemma": {"norm": "rms_offset", "mlp_type": "geglu", "scale_embeddings": True, "kv_heads": 1},
    "blockwise": {"attention": "blockwise", "isolate_documents": True},
    "llama3": {
        "rope_scaling": {
            "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_length": 8,
        },
    },
}  # fmt: skip
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]


@pytest.fixture
def compiled():
    """The seconds of each compilation so far in the test."""
    found: list[float] = []

    def heard(name: str, seconds: float, **_: object) -> None:
        if "backend_compile" in name:
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(heard)
    yield found
    jax.monitoring.unregister_event_duration_listener(heard)


def of(mesh=None, model=None, window=16, cached=True, **more):
    data = {**TOKENS, "window": window, "vocab_size": 32}
    made = experiment(mesh or {"data": 1}, model={**GPT, **(model or {})}, data=data, **more)
    state = made.program.init()
    run = Generator(made.program, window, 32, cached)
    settings = {"count": 8, "sampling": Sampling()}
    return partial(run, state.params, state.buffers, **settings), made, state


@pytest.mark.full
@pytest.mark.parametrize(
    "family",
    [
        "window",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("gemma", "llama3")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "qwen3", "blockwise")),
    ],
)
def test_a_cache_changes_no_token(family):
    runs = (of(model=FAMILIES[family], cached=cached)[0] for cached in (True, False))
    cached, whole = (run(prompts=PROMPTS) for run in runs)
    assert [t.tokens for t in cached] == [t.tokens for t in whole]
    assert [t.tokens[: len(p)] for t, p in zip(cached, PROMPTS, strict=True)] == PROMPTS


@pytest.mark.slow
def test_on_a_mesh_past_the_window_with_log_probabilities_of_training():
    """A text does not depend on the mesh; three rows fill up two parts of the data axis."""
    model = {"layers": 1}
    sampling = Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=3)
    asked = {"prompts": PROMPTS, "count": 14, "sampling": sampling, "log_probs": True}
    one, made, state = of(model=model)
    texts, several = one(**asked), of({"data": 2, "tensor": 2}, model)[0](**asked)
    assert [t.tokens for t in texts] == [t.tokens for t in several]
    assert max(len(t.tokens) for t in texts) == 19
    module = made.program.model.bind(state.params, state.buffers)

    @jax.jit
    def log_probs(tokens_BL, targets_BL):
        logits_BLV = module.padded_head(module.hidden(tokens_BL, jnp.zeros_like(tokens_BL)))
        return -optax.softmax_cross_entropy_with_integer_labels(logits_BLV, targets_BL)

    longest = np.asarray([texts[2].tokens])
    found = [log_probs(longest[:, i : i + 16], longest[:, i + 1 : i + 17])[0] for i in (0, 1, 2)]
    expected = [*found[0][4:], found[1][-1], found[2][-1]]
    assert texts[2].log_probs == [float(x) for x in expected]


@pytest.mark.full
def test_a_stop_token_ends_one_text_alone_and_compiles_nothing(compiled):
    run = of(model={"layers": 1})[0]
    free = run(prompts=PROMPTS)
    stop, programs = free[0].tokens[5], len(compiled)
    texts = run(prompts=PROMPTS, stops=[stop])
    assert len(compiled) == programs > 0
    for text, other, prompt in zip(texts, free, PROMPTS, strict=True):
        added = other.tokens[len(prompt) :]
        kept = added[: added.index(stop) + 1] if stop in added else added
        assert (text.tokens, text.stopped) == ([*prompt, *kept], stop in added)
    assert any(t.stopped for t in texts)


@pytest.mark.full
def test_calls_share_what_is_compiled(compiled):
    """Other tokens, lengths, counts and seeds need no program, a further prompt needs one."""
    run = of(model={"layers": 1}, window=64)[0]
    asked = {"sampling": Sampling(temperature=1.0, seed=1), "log_probs": True}
    first = run(prompts=PROMPTS, **asked)
    programs = len(compiled)
    again = run(prompts=PROMPTS, **asked)
    asked["sampling"] = Sampling(temperature=1.0, seed=2)
    other = run(prompts=[[7] * 9, [8], [9] * 30], **asked | {"count": 20})
    assert len(compiled) == programs > 0
    assert (first, [len(t.tokens) for t in other]) == (again, [29, 21, 50])
    assert [t.tokens for t in run(prompts=PROMPTS, **asked)] != [t.tokens for t in first]
    run(prompts=PROMPTS * 2, **asked)
    assert len(compiled) > programs


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 0.62, "top_k": 3}, {0}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_tokens_to_choose_among(settings, kept):
    """With probabilities .6, .25, .1 and .05; the first is .63 of the first three."""
    logits_BV = jnp.log(jnp.asarray([[0.6, 0.25, 0.1, 0.05]]))
    sampling = Sampling(temperature=1.0, seed=1, **settings)
    draw, key = jax.jit(sampling.draw), jax.random.key(sampling.seed)
    assert {int(draw(logits_BV, jnp.int32(i), key)[0]) for i in range(200)} == kept


@pytest.mark.parametrize("mesh", [{"data": 1}, pytest.param({"tensor": 2}, marks=pytest.mark.full)])
def test_separate_layers_change_no_token_and_share_memory(mesh):
    run, made, state = of(mesh)
    layers = decode.layer_views(state.params, least=0)
    assert len(layers) == GPT["layers"]
    for name, stack in flatten_with_names(state.params["blocks"]):
        for i, layer in enumerate(layers):
            own = dict(flatten_with_names(layer))[name]
            assert own.sharding.spec == PartitionSpec(*stack.sharding.spec[1:])
            np.testing.assert_array_equal(own, stack[i])
    apart = Generator(made.program, 16, 32, separate_bytes=0)
    texts = apart(*run.args, prompts=PROMPTS, **run.keywords)
    assert [t.tokens for t in texts] == [t.tokens for t in run(prompts=PROMPTS)]
    whole = state.params["blocks"]["mlp"]["up"].addressable_shards[0].data
    first = layers[0]["mlp"]["up"].addressable_shards[0].data
    assert first.unsafe_buffer_pointer() == whole.unsafe_buffer_pointer()


def test_small_layers_and_split_stacks_stay_together():
    params = of()[2].params
    assert decode.layer_views(params) == ()
    split = NamedSharding(jax.make_mesh((2,), ("stage",)), PartitionSpec("stage"))
    moved = {**params, "blocks": jax.device_put(params["blocks"], split)}
    assert decode.layer_views(moved, least=0) == ()
