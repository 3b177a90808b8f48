"""Families: our model computes what transformers computes, and files come back as they were.

The golden file holds what transformers computed with drawn weights; it is written by
`python -m benchmarks.models.drawn PYTHON tests/interchange/golden.json`.
"""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from chosen import quick

from benchmarks.models.drawn import CONFIGS, given, ours, seen, write_drawn
from jaxdist.errors import ConfigError, DataError
from jaxdist.interchange.families import (
    FAMILIES,
    architecture,
    config_for,
    families_of,
    family_of,
)
from jaxdist.interchange.family import Inputs
from jaxdist.interchange.source import open_source
from jaxdist.interchange.write import config_of

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())
QUICK = ("llama3", "gpt2", "bert", "resnet")
SLOW = ("qwen2", "qwen3", "llama", "mistral", "bert_classes", "resnet_basic")
"""Options that others have too; the quick ones have all layouts of text, and one of images."""


@cache
def computed(name, folder):
    write_drawn(name, folder / name)
    return ours(folder / name, given(open_source(folder / name)))


@pytest.mark.parametrize(
    "name",
    [
        *quick(*QUICK, of=[n for n in CONFIGS if n not in SLOW]),
        *quick(of=SLOW, slow=True),
    ],
)
@pytest.mark.every(3)
def test_logits_and_gradients_are_those_of_transformers(name, tmp_path):
    """To 1e-5 of the largest, at positions 1 to 512."""
    found, right = computed(name, tmp_path), GOLDEN[name]
    logits = np.stack([*right["logits"].values()])
    most = np.abs(logits).max()
    own = np.stack([*seen(found["logits"]).values()])
    np.testing.assert_allclose(own, logits, rtol=0, atol=1e-5 * most)
    most = max(right["grads"].values())
    for tensor, norm in right["grads"].items():
        assert abs(np.linalg.norm(found[tensor]) - norm) < 1e-5 * most, tensor


def test_every_family_is_drawn():
    assert {config["model_type"] for config in CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_written_as_it_was_read(name):
    """From options of our model back to the family, and to the same options and sizes."""
    family = family_of(CONFIGS[name], where=name)
    model, sizes = config_for(family.model(CONFIGS[name])), family.inputs(CONFIGS[name])
    assert family in families_of(model)
    written = family.config(architecture(model)) | family.written_inputs(sizes)
    assert architecture(config_for(family.model(written))) == architecture(model)
    assert family.inputs(written) == sizes


def test_a_window_counts_the_position_itself_in_their_config_only():
    model = family_of(CONFIGS["mistral"], where="").model(CONFIGS["mistral"])
    assert (CONFIGS["mistral"]["sliding_window"], model["attention_window"]) == (48, 47)


REFUSED = [
    ({"model_type": "t5"}, r"model_type 't5' is not a known architecture; allowed: llama"),
    ({**CONFIGS["bert"], "hidden_act": "relu"}, r"hidden_act is 'relu', .* bert computes 'gelu'"),
    (
        {**CONFIGS["bert"], "architectures": ["BertForQuestionAnswering"]},
        r"architectures names BertForQuestionAnswering, but .* set architectures to \[BertModel\]",
    ),
    ({**CONFIGS["vit"], "qkv_bias": False}, r"qkv_bias is False, .* vit computes True"),
    ({**CONFIGS["resnet"], "hidden_sizes": [32, 48]}, r"hidden_sizes is \[32, 48\] with depths"),
    ({**CONFIGS["resnet"], "layer_type": "wide"}, r"layer_type is 'wide', but model.type resnet"),
    (
        {**CONFIGS["resnet"], "downsample_in_bottleneck": True},
        r"downsample_in_bottleneck is True, but",
    ),
    ({"model_type": "lama"}, r"did you mean 'llama'\? \(allowed: llama, mistral"),
    ({}, r"model_type 'None' is not a known architecture; allowed: llama.* --table FILE"),
    ({**CONFIGS["llama"], "hidden_act": "relu"}, r"hidden_act is 'relu', but .* 'silu'"),
    ({"model_type": "llama"}, r"lacks num_hidden_layers, hidden_size"),
    (
        {**CONFIGS["llama"], "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        r"does not compute rotary positions of type 'yarn'",
    ),
    (
        {**CONFIGS["qwen2"], "layer_types": ["full_attention", "sliding_attention"]},
        r"layer_types has full_attention, sliding_attention, but all layers",
    ),
    (
        {
            **CONFIGS["qwen2"],
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
        r"all layers of model.type gpt have the same attention",
    ),
]


@pytest.mark.parametrize(("config", "words"), REFUSED)
def test_what_our_model_does_not_compute_is_refused_by_name(config, words):
    with pytest.raises(ConfigError, match=words):
        family_of(config, where="config.json").model(config)


@pytest.mark.parametrize(
    ("key", "rope", "words"),
    [
        ("rope_scaling", {"type": "linear"}, r"rope_scaling of type 'linear' lacks factor:"),
        (
            "rope_scaling",
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
            r"rope_scaling .* lacks high_freq_factor, original_max_position_embeddings:",
        ),
        ("rope_parameters", {"rope_type": "linear"}, r"rope_parameters of type 'linear' lacks"),
    ],
)
def test_a_scaling_without_its_keys_is_one_message(key, rope, words):
    config = {**CONFIGS["llama"], key: rope}
    with pytest.raises(DataError, match=rf"config\.json: {words}"):
        family_of(config, where="config.json").model(config)


@pytest.mark.parametrize(
    "other",
    [
        {"model_type": "gemma2", "vocab_size": 67},
        {"model_type": "llama", "vocab_size": 67},
        {**CONFIGS["llama"], "hidden_act": "relu"},
    ],
)
def test_a_config_of_another_model_beside_the_tokenizer_is_left_out(other, tmp_path):
    """A tokenizer may be that of any model, also of a family that our model does not compute."""
    (tmp_path / "config.json").write_text(json.dumps(other))
    model = config_for(family_of(CONFIGS["llama"], where="").model(CONFIGS["llama"]))
    found = config_of(model, Inputs(67), tmp_path, 16)
    assert (found["model_type"], found["hidden_act"]) == ("llama", "silu")
    assert found["num_hidden_layers"] == CONFIGS["llama"]["num_hidden_layers"]


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("llama", "vocab_size", None, r"has None for vocab_size: set vocab_size to the"),
        ("vit", "image_size", "24", r"has '24' for image_size"),
        ("bert_classes", "num_labels", 0, r"has 0 for num_labels"),
    ],
)
def test_a_size_that_is_none_is_one_message(name, key, value, words):
    config = {**CONFIGS[name], "id2label": None, key: value}
    with pytest.raises(ConfigError, match=words):
        family_of(config, where="config.json").inputs(config)


def test_options_that_do_not_fit_each_other_are_one_message():
    config = {**CONFIGS["bert"], "num_attention_heads": 5}
    with pytest.raises(ConfigError, match=r"config.json describes no model: .*heads 5 must divide"):
        config_for(family_of(config, where="").model(config))


def test_images_that_are_no_squares_have_no_config_of_a_vit():
    with pytest.raises(ConfigError, match=r"24 x 16 pixels, but config.json .* only square images"):
        FAMILIES["vit"].written_inputs(Inputs(classes=3, image=(24, 16, 3)))
