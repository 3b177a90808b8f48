"""Which activations each policy keeps, what that costs in the program, and what is refused."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import SingleDeviceSharding

from jaxdist.config import Config, Document, validate
from jaxdist.errors import ConfigError
from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.hlo import compile_with_text, ledger
from jaxdist.models.build import make_model
from jaxdist.models.functional import functional
from jaxdist.models.gpt import GptConfig
from jaxdist.models.hints import no_hint
from jaxdist.models.layers import scan_blocks, stack
from jaxdist.models.remat import PRESETS, ActivationName, check_memory

VOCAB, B, L, LAYERS, D, H, K, F = 61, 4, 64, 12, 32, 4, 2, 96
SIZES: dict[str, int] = {
    "query": D,
    "key": D * K // H,
    "value": D * K // H,
    "attention": D,
    "attention_out": D,
    "mlp_gate": F,
    "mlp_up": F,
}
"""Elements at one position."""


def gpt(remat: Any, **sizes: int) -> Any:
    given = {"layers": LAYERS, "embed": D, "heads": H, "kv_heads": K, "mlp": F, **sizes}
    config = validate(Document({"type": "gpt", "remat": remat, **given}), GptConfig)
    return functional(lambda rngs: config.build(rngs, vocab_size=VOCAB))


def loss_of(model: Any) -> Any:
    return lambda params, x: jnp.square(model.bind(params, {})(x)).mean()


TOKENS = jax.ShapeDtypeStruct((B, L), jnp.int32)


def kept_bytes(remat: Any) -> int:
    """Of everything that the forward pass leaves to the backward pass."""
    model = gpt(remat)
    pull = jax.eval_shape(lambda p, x: jax.vjp(loss_of(model), p, x)[1], model.params, TOKENS)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))


def test_every_name_but_the_inputs_has_a_size_here() -> None:
    assert {*SIZES, "block_input"} == {*get_args(ActivationName)}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.every(3)
def test_a_saved_activation_is_kept_and_nothing_else(name: str) -> None:
    kept = kept_bytes({name: "save"}) - kept_bytes("full")
    assert kept == LAYERS * B * L * SIZES[name] * 4


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_keeps_its_activations(preset: str) -> None:
    kept = kept_bytes(preset) - kept_bytes("full")
    assert kept == LAYERS * B * L * sum(SIZES[name] for name in PRESETS[preset]) * 4


def test_what_is_not_saved_is_recomputed() -> None:
    said = {"query": "save", "key": "recompute", "block_input": "save"}
    assert kept_bytes(said) == kept_bytes({"query": "save"})


def test_names_change_what_other_policies_keep_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("none", "elementwise", "dots", "full")
    with_names = [kept_bytes(word) for word in words]
    monkeypatch.setattr("jaxdist.models.gpt.named", lambda x, _: x)
    monkeypatch.setattr("jaxdist.models.feed_forward.swiglu.named", lambda x, _: x)
    assert [kept_bytes(word) for word in words] == with_names


@cache
def compiled(remat: str) -> tuple[int, int]:
    """Temporary bytes and FLOPs of the gradient."""
    model = gpt(remat)
    found = jax.jit(jax.grad(loss_of(model))).lower(model.params, TOKENS).compile()
    statistics: Any = found.memory_analysis()
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    return statistics.temp_size_in_bytes, int(ledger(found, mesh).flops_high)


@pytest.mark.slow
def test_presets_stand_between_none_and_full_in_memory_and_in_flops() -> None:
    names = ("none", "minimal", "save_dots_except_mlp", "save_qkv", "full")
    memory, flops = zip(*map(compiled, names), strict=True)
    assert list(memory) == sorted(memory, reverse=True)
    assert len({*memory}) == len(names)
    tokens, head = LAYERS * B * L, D // H
    scores = 2 * tokens * L * H * head
    # What each computes more than the one before: attention; the products to gate and up; the
    # projection out; those to query, key and value.
    more = [b - a for a, b in pairwise(flops)]
    assert more == [2 * scores, 4 * tokens * D * F, 2 * tokens * D * D, 2 * tokens * D * 2 * D]


@pytest.mark.full
def test_attention_alone_saves_its_second_product() -> None:
    head = D // H
    assert compiled("full")[1] - compiled("save_attention")[1] == 2 * LAYERS * B * L * L * H * head
    assert compiled("save_attention")[0] > compiled("full")[0]


class Plain(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


class Wide(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jnp.ones((1024, 1024)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(checkpoint_name(x @ self.kernel[...], "hidden"))


class Named(Plain):
    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(checkpoint_name(self.linear(x), "hidden"))


def scanned(kind: type[Plain], remat: Any) -> jax.Array:
    return scan_blocks(stack(kind, 2, nnx.Rngs(0)), jnp.ones((3, 4)), remat=remat)


def test_blocks_of_ones_own_are_kept_by_their_own_names() -> None:
    assert scanned(Named, {"hidden": "save"}).shape == (3, 4)


@pytest.mark.parametrize(
    ("kind", "remat", "message"),
    [
        (
            Plain,
            "save_qkv",
            r"remat save_qkv keeps .* but the blocks name no activations: .*checkpoint_name",
        ),
        (Plain, {"hidden": "save"}, r"remat \{hidden: save\} keeps .* or use one of none, elem"),
        (Named, {"hiden": "save"}, r"no activation .* 'hiden'; did you mean 'hidden'\?"),
        (Named, ["full", "minimal"], r"remat full, minimal: .* 'query'; allowed: hidden"),
    ],
)
def test_names_that_blocks_do_not_give_are_refused(
    kind: type[Plain], remat: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        scanned(kind, remat)


class GptSection(Config):
    """Of a config, what is looked at here."""

    model: GptConfig


@pytest.mark.parametrize(
    ("remat", "message"),
    [
        (
            {"quary": "save"},
            r"remat\.quary .*unknown key; did you mean 'query'\? \(allowed: b",
        ),
        ({"query": "keep"}, r"remat\.query .*allowed: save, offload, recompute"),
        ({"block_input": "recompute"}, r"recomputed from block_input, .*: save block_input"),
        ({}, r"remat = \{\}"),
        ([], r"remat = \[\]"),
        # Of a name that is none, and of a list without one entry that is right, no more is said.
        ({"quary": ["save"]}, r"remat\.quary .*unknown key"),
        (["save_qvk"], r"remat\.0 = 'save_qvk'.*did you mean 'save_qkv'"),
        ("save_qvk", r"did you mean 'save_qkv'"),
        (["full", {"quary": "save"}], r"remat\.1\.quary .*unknown key; did you mean 'query'"),
    ],
    ids=str,
)
def test_a_config_is_refused_with_what_it_may_say(remat: Any, message: str) -> None:
    model = {"type": "gpt", "layers": 3, "embed": 32, "heads": 4, "remat": remat}
    with pytest.raises(ConfigError, match=message) as refused:
        validate(Document({"model": model}), GptSection)
    assert str(refused.value).count("model.remat") == 1


@pytest.mark.parametrize(
    "model", [{"type": "mlp", "hidden": [8]}, {"type": "import", "path": "a:b"}]
)
def test_models_without_blocks_take_no_policy(model: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"model\.remat = .*unknown key"):
        validate(Document({"model": {**model, "remat": {"query": "save"}}}), ExperimentConfig)


OFFLOADED: Any = {"query": "offload", "value": "offload", "attention": "offload", "mlp_up": "save"}


def offloading(mesh: dict[str, int], **parallel: Any) -> Experiment:
    sections = {
        "model": {"type": "gpt", "layers": 2, "embed": 32, "heads": 4, "remat": OFFLOADED},
        "data": {"type": "synthetic", "kind": "tokens", "window": 8, "heldout_examples": 0},
        "optim": {"type": "adamw", "learning_rate": 1e-3},
        "train": {"steps": 2, "batch_size": 8},
        "mesh": mesh,
        "parallel": parallel,
    }
    return build(validate(Document(sections), ExperimentConfig))


@pytest.mark.full
def test_offloading_changes_no_number(devices: Any) -> None:
    """On CPU both memories are the machine's; collectives of ours stand between."""
    found = offloading({"data": 8}, reduce={"type": "ring"}, zero={"stage": 3}).program
    state, batch = found.init(), jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), found.batch)
    alone = found.evaluate(state.params, state.buffers, batch)
    _, metrics = found.train(state, batch)
    loss = alone["loss"].total / alone["loss"].weight
    assert metrics[0] == pytest.approx(float(loss), rel=1e-6)


def test_offloading_in_a_pipeline_is_refused(devices: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"offload in model\.remat with mesh \{.*stage: 2\}.*host"
    ):
        offloading({"data": 4, "stage": 2})


def test_offloading_needs_the_hosts_memory() -> None:
    check_memory(OFFLOADED, ["device", "pinned_host"])
    check_memory({"query": "save"}, ["device"])
    device: Any = SimpleNamespace(
        platform="other", addressable_memories=lambda: [SimpleNamespace(kind="device")]
    )
    config = GptConfig(type="gpt", layers=2, embed=32, heads=4, remat=("full", OFFLOADED))
    with pytest.raises(
        ConfigError, match=r"remat full, \{query: offload, .*only device: save or"
    ) as refused:
        make_model(config, shapes={}, vocab_size=9, classes=None, hint=no_hint, device=device)
    assert refused.value.setting == ("remat",)


@pytest.mark.slow  # which residuals are, and that no number changes: the tests above
@pytest.mark.needs_libtpu
def test_on_tpus_what_is_offloaded_lies_in_the_hosts_memory(tpu_devices: Any) -> None:
    layers, rows, width = 8, 8192, 1024  # less than a chip's own 128 MB would never leave it
    graph, state = nnx.split(nnx.eval_shape(lambda: stack(Wide, layers, nnx.Rngs(0))))
    place = SingleDeviceSharding(tpu_devices[0])

    def compiled(keep: Any) -> tuple[Any, str]:
        def loss(state: Any, x: jax.Array) -> jax.Array:
            return scan_blocks(nnx.merge(graph, state), x, remat={"hidden": keep}).mean()

        given = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            (state, jax.ShapeDtypeStruct((rows, width), jnp.float32)),
        )
        found, text = compile_with_text(jax.jit(jax.grad(loss)).lower(*given))
        return found.memory_analysis(), text

    (kept, plain), (moved, text) = compiled("save"), compiled("offload")
    hidden_bytes = layers * rows * width * 4
    assert (kept.host_temp_size_in_bytes, moved.host_temp_size_in_bytes) == (0, hidden_bytes)
    assert kept.temp_size_in_bytes - moved.temp_size_in_bytes > 0.7 * hidden_bytes
    assert "S(5)" in text  # the host's memory space
    assert "S(5)" not in plain
