"""Families: our model computes what transformers computes, and files come back as they were.

The golden file holds what transformers computed with drawn weights; it is written by
`python -m benchmarks.models.drawn PYTHON tests/interchange/golden.json`.
"""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.models.drawn import CONFIGS, SEEN, ours, tokens, write_drawn
from jaxdist.errors import ConfigError, DataError
from jaxdist.interchange.families import FAMILIES, architecture, families_of, family_of
from jaxdist.interchange.write import config_of
from jaxdist.models.gpt import GptConfig

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())
QUICK = ("llama3", "gpt2")
"""Between them they have all layouts; the others run with `-m full`."""


@cache
def computed(name, folder):
    write_drawn(name, folder / name)
    return ours(folder / name, tokens())


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in CONFIGS]
)
def test_logits_and_gradients_are_those_of_transformers(name, tmp_path):
    """To 1e-5 of the largest, at positions 1 to 512."""
    found, right = computed(name, tmp_path), GOLDEN[name]
    logits = np.stack([right["logits"][str(at)] for at in SEEN])
    most = np.abs(logits).max()
    np.testing.assert_allclose(found["logits"][list(SEEN), ::16], logits, rtol=0, atol=1e-5 * most)
    most = max(right["grads"].values())
    for tensor, norm in right["grads"].items():
        assert abs(np.linalg.norm(found[tensor]) - norm) < 1e-5 * most, tensor


def test_every_family_is_drawn():
    assert {config["model_type"] for config in CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_written_as_it_was_read(name):
    """From options of gpt back to the family, and to the same options."""
    family = family_of(CONFIGS[name], where=name)
    model = GptConfig.model_validate(family.model(CONFIGS[name]))
    assert family in families_of(model)
    again = GptConfig.model_validate(family.model(family.config(architecture(model))))
    assert architecture(again) == architecture(model)


def test_a_window_counts_the_position_itself_in_their_config_only():
    model = family_of(CONFIGS["mistral"], where="").model(CONFIGS["mistral"])
    assert (CONFIGS["mistral"]["sliding_window"], model["attention_window"]) == (48, 47)


REFUSED = [
    ({"model_type": "bert"}, r"model_type 'bert' is not a known architecture \(there is no model"),
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
        r"all layers of model.type gpt attend alike",
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
    model = GptConfig.model_validate(family_of(CONFIGS["llama"], where="").model(CONFIGS["llama"]))
    found = config_of(model, 67, tmp_path, 16)
    assert (found["model_type"], found["hidden_act"]) == ("llama", "silu")
    assert found["num_hidden_layers"] == CONFIGS["llama"]["num_hidden_layers"]
