"""Families of published models: tables that match names and layouts of tensors with parameters.

The letters in layouts are: V vocabulary, D embed, H heads, K kv_heads, d head_dim, F mlp, P
positions, E experts. In the name of a tensor, `{layer}` is the number of a layer, an index of the
parameter's first dim, and `{expert}` is the number of an expert, an index of the next dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from jaxdist.errors import ConfigError, DataError, did_you_mean
from jaxdist.interchange.encoders import ENCODERS
from jaxdist.interchange.family import OTHER_MODEL, Family, Inputs, Row, block
from jaxdist.models.bert import BertConfig
from jaxdist.models.build import ModelConfig, make_model
from jaxdist.models.functional import Functional, functional
from jaxdist.models.gpt import GptConfig
from jaxdist.models.hints import no_hint
from jaxdist.models.images.resnet import ResnetConfig
from jaxdist.models.images.vit import VitConfig
from jaxdist.types import JsonObject

RUN_ONLY = (
    "isolate_documents", "attention", "compute_dtype", "remat", "scan_unroll", "vocab_multiple",
    "freeze", "lora", "dropout",
)  # fmt: skip
"""The options of models that do not change the function that a model computes."""


LLAMA_ROWS: Mapping[str, Row] = {
    "embedding": Row("model.embed_tokens.weight", "V D"),
    "norm/scale": Row("model.norm.weight", "D"),
    "output": Row("lm_head.weight", "V D -> D V"),
    **block(
        "model.layers.{layer}.",
        {
            "attention_norm/scale": ("input_layernorm.weight", "D"),
            "attention/query": ("self_attn.q_proj.weight", "(H d) D -> D H d"),
            "attention/key": ("self_attn.k_proj.weight", "(K d) D -> D K d"),
            "attention/value": ("self_attn.v_proj.weight", "(K d) D -> D K d"),
            "attention/out": ("self_attn.o_proj.weight", "D (H d) -> H d D"),
            "attention/query_bias": ("self_attn.q_proj.bias", "(H d) -> H d"),
            "attention/key_bias": ("self_attn.k_proj.bias", "(K d) -> K d"),
            "attention/value_bias": ("self_attn.v_proj.bias", "(K d) -> K d"),
            "attention/out_bias": ("self_attn.o_proj.bias", "D"),
            "attention/query_norm/scale": ("self_attn.q_norm.weight", "d"),
            "attention/key_norm/scale": ("self_attn.k_norm.weight", "d"),
            "mlp_norm/scale": ("post_attention_layernorm.weight", "D"),
            "mlp/gate": ("mlp.gate_proj.weight", "F D -> D F"),
            "mlp/up": ("mlp.up_proj.weight", "F D -> D F"),
            "mlp/down": ("mlp.down_proj.weight", "D F -> F D"),
        },
    ),
}
"""The rows of llama and of the families that use the same names; no model uses all rows."""

MIXTRAL_ROWS: Mapping[str, Row] = {
    **LLAMA_ROWS,
    **block(
        "model.layers.{layer}.block_sparse_moe.",
        {
            "mlp/router": ("gate.weight", "E D -> D E"),
            "mlp/gate": ("experts.{expert}.w1.weight", "F D -> D F"),
            "mlp/up": ("experts.{expert}.w3.weight", "F D -> D F"),
            "mlp/down": ("experts.{expert}.w2.weight", "D F -> F D"),
        },
    ),
}
"""The rows of mixtral, whose rows for attention are the rows of llama."""

_ATTENTION = {"query": 0, "key": 1, "value": 2}
GPT2_ROWS: Mapping[str, Row] = {
    "embedding": Row("transformer.wte.weight", "V D"),
    "positions": Row("transformer.wpe.weight", "P D"),
    "norm/scale": Row("transformer.ln_f.weight", "D"),
    "norm/bias": Row("transformer.ln_f.bias", "D"),
    "output": Row("lm_head.weight", "V D -> D V"),
    **block(
        "transformer.h.{layer}.",
        {
            "attention_norm/scale": ("ln_1.weight", "D"),
            "attention_norm/bias": ("ln_1.bias", "D"),
            "attention/out": ("attn.c_proj.weight", "(H d) D -> H d D"),
            "attention/out_bias": ("attn.c_proj.bias", "D"),
            "mlp_norm/scale": ("ln_2.weight", "D"),
            "mlp_norm/bias": ("ln_2.bias", "D"),
            "mlp/up": ("mlp.c_fc.weight", "D F"),
            "mlp/up_bias": ("mlp.c_fc.bias", "F"),
            "mlp/down": ("mlp.c_proj.weight", "F D"),
            "mlp/down_bias": ("mlp.c_proj.bias", "D"),
        },
    ),
    **{
        f"blocks/attention/{name}{end}": Row(f"transformer.h.{{layer}}.attn.c_attn.{kind}", how, i)
        for name, i in _ATTENTION.items()
        for end, kind, how in (
            ("", "weight", "D (3 H d) -> D H d"),
            ("_bias", "bias", "(3 H d) -> H d"),
        )
    },
}


_SCALINGS: Mapping[str, Mapping[str, str]] = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_length",
    },
}
"""For each type of `rope_scaling`, the option of each key of config.json."""


def _rotary(config: Mapping[str, Any]) -> JsonObject:
    """Return the options for rotary positions, from the new or the old keys of config.json."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if kind == "default":
        return {"rope_theta": theta}
    if kind not in _SCALINGS:
        raise ConfigError(
            f"config.json: model.type gpt does not compute rotary positions of type {kind!r}: it "
            f"computes default, linear and llama3. {OTHER_MODEL}"
        )
    lacking = [name for name in _SCALINGS[kind] if name not in rope]
    if lacking:
        raise DataError(
            f"config.json: {key} of type {kind!r} lacks {', '.join(lacking)}: download the model's "
            "own config.json"
        )
    scaling = {own: rope[name] for name, own in _SCALINGS[kind].items()}
    return {"rope_theta": theta, "rope_scaling": {"type": kind, **scaling}}


def _written_rotary(options: JsonObject) -> JsonObject:
    scaling: Any = options["rope_scaling"]
    if scaling is None:
        return {"rope_theta": options["rope_theta"]}
    rope = {"rope_type": scaling["type"], **{k: v for k, v in scaling.items() if k != "type"}}
    if "original_length" in rope:
        rope["original_max_position_embeddings"] = rope.pop("original_length")
    return {"rope_theta": options["rope_theta"], "rope_scaling": rope}


def _window(config: Mapping[str, Any]) -> JsonObject:
    """Return the option for the attention window.

    The option is one less than the window in config.json, which includes the position itself. The
    result is empty if the layers have no window.
    """
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = set(config.get("layer_types") or ())
    if not kinds and window is not None and "max_window_layers" in config:
        below, layers = config["max_window_layers"], config["num_hidden_layers"]
        kinds |= {"full_attention"} if below > 0 else set()
        kinds |= {"sliding_attention"} if below < layers else set()
    if len(kinds) > 1 or (kinds == {"sliding_attention"} and window is None):
        raise ConfigError(
            f"config.json: layer_types has {', '.join(sorted(kinds))}, but all layers of "
            f"model.type gpt have the same attention. {OTHER_MODEL}"
        )
    if window is None or kinds == {"full_attention"}:
        return {}
    return {"attention_window": window - 1}


def _llama(config: Mapping[str, Any]) -> JsonObject:
    biases = "attention" if config.get("attention_bias") else "none"
    return {**_rotary(config), "biases": biases}


def _written_llama(options: JsonObject) -> JsonObject:
    return {**_written_rotary(options), "attention_bias": options["biases"] == "attention"}


def _windowed(config: Mapping[str, Any]) -> JsonObject:
    return {**_rotary(config), **_window(config)}


def _written_window(options: JsonObject) -> JsonObject:
    window: Any = options["attention_window"]
    window = None if window is None else window + 1
    more = {"sliding_window": window, "use_sliding_window": window is not None}
    if window is not None:
        # In a qwen model, the layers below max_window_layers have no window, so 0 gives every layer
        # a window.
        more["max_window_layers"] = 0
    return {**_written_rotary(options), **more}


def _qwen3(config: Mapping[str, Any]) -> JsonObject:
    return {**_windowed(config), "biases": _llama(config)["biases"]}


def _written_qwen3(options: JsonObject) -> JsonObject:
    return {**_written_window(options), **_written_llama(options)}


def _mixtral(config: Mapping[str, Any]) -> JsonObject:
    experts = {
        "count": config["num_local_experts"],
        "top_k": config["num_experts_per_tok"],
        "balance_loss": config["router_aux_loss_coef"],
    }
    return {**_windowed(config), "experts": experts}


def _written_mixtral(options: JsonObject) -> JsonObject:
    experts: Any = options["experts"] or {"count": 1, "top_k": 1}
    found = {"num_local_experts": experts["count"], "num_experts_per_tok": experts["top_k"]}
    return {**_written_window(options), **found}


KEYS: Mapping[str, str] = {
    "num_hidden_layers": "layers",
    "hidden_size": "embed",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_size",
    "intermediate_size": "mlp",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tied_head",
}
_MISSING: JsonObject = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_SILU = {"hidden_act": ("silu",)}
_GELU = ("gelu_pytorch_tanh", "gelu_new")
FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            LLAMA_ROWS,
            KEYS,
            {"norm": "rms"},
            {**_SILU, "mlp_bias": (False,)},
            _MISSING,
            more=_llama,
            written=_written_llama,
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            LLAMA_ROWS,
            KEYS,
            {"norm": "rms"},
            _SILU,
            _MISSING,
            more=_windowed,
            written=_written_window,
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            MIXTRAL_ROWS,
            KEYS,
            {"norm": "rms"},
            {**_SILU, "router_jitter_noise": (0.0, 0)},
            {
                **_MISSING,
                "rms_norm_eps": 1e-5,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "router_aux_loss_coef": 0.001,
            },
            more=_mixtral,
            written=_written_mixtral,
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            LLAMA_ROWS,
            # The head size of a qwen2 model is embed / heads, since its config.json has no
            # head_dim.
            {key: own for key, own in KEYS.items() if key != "head_dim"},
            {"norm": "rms", "biases": "qkv"},
            _SILU,
            {**_MISSING, "use_sliding_window": False},
            more=_windowed,
            written=_written_window,
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            LLAMA_ROWS,
            KEYS,
            {"norm": "rms", "qk_norm": True},
            _SILU,
            {**_MISSING, "head_dim": 128, "use_sliding_window": False},
            more=_qwen3,
            written=_written_qwen3,
        ),
        Family(
            "gemma",
            "GemmaForCausalLM",
            LLAMA_ROWS,
            KEYS,
            {"norm": "rms_offset", "mlp_type": "geglu", "scale_embeddings": True},
            {"hidden_act": _GELU, "use_bidirectional_attention": (None, False)},
            {**_MISSING, "head_dim": 256, "tie_word_embeddings": True},
            more=_llama,
            written=_written_llama,
        ),
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            GPT2_ROWS,
            {
                "n_layer": "layers",
                "n_embd": "embed",
                "n_head": "heads",
                "n_inner": "mlp",
                "n_positions": "positions",
                "layer_norm_epsilon": "norm_epsilon",
                "tie_word_embeddings": "tied_head",
            },
            {"norm": "layer", "mlp_type": "gelu", "biases": "all"},
            {
                "activation_function": _GELU[::-1],
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
                "add_cross_attention": (False,),
            },
            {"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
            (".attn.bias", ".attn.masked_bias"),
            "transformer.",
            more=lambda config: {"mlp": config["n_inner"] or 4 * config["n_embd"]},
        ),
        *ENCODERS,
    )
}
"""Every family, by the `model_type` of its config.json."""
Described = GptConfig | BertConfig | VitConfig | ResnetConfig
"""The config of any model that a family describes."""
_MODELS: TypeAdapter[Any] = TypeAdapter(ModelConfig)


def family_of(config: Mapping[str, Any], *, where: str) -> Family:
    """Return the family of a config.json.

    Args:
      where: the name of the source, for errors.

    Raises:
      ConfigError: the architecture has no table; the message lists the known families.
    """
    name = str(config.get("model_type"))
    if name in FAMILIES:
        return FAMILIES[name]
    raise ConfigError(
        f"{where}: model_type {name!r} is not a known architecture; "
        f"{did_you_mean(name, FAMILIES)}. Bring a model of your own with --config CONFIG (model: "
        f"{{type: import}}) and a table of its names: --table FILE"
    )


def build_model(options: JsonObject, inputs: Inputs) -> Functional:
    """Build the model with the options that `Family.model` returns.

    Raises:
      ConfigError: the options do not fit each other, or do not fit the inputs.
    """
    shapes = {} if inputs.image is None else {"image": inputs.image}
    make = make_model(
        config_for(options), shapes=shapes, vocab_size=inputs.vocab_size or None,
        classes=inputs.classes or None, hint=no_hint,
    )  # fmt: skip
    return functional(make)


def config_for(options: JsonObject) -> Described:
    """Return the config of a model, given the options that `Family.model` returns.

    Raises:
      ConfigError: config.json has options that do not fit each other.
    """
    try:
        return _MODELS.validate_python(options)
    except ValueError as error:
        raise ConfigError(f"config.json describes no model: {_reasons(error)}") from error


def _reasons(error: Any) -> str:
    found = [
        f"{'.'.join(map(str, one['loc'][1:])) or 'the model'}: {one['msg']}"
        for one in error.errors()
    ]
    return "; ".join(found[:4])


def architecture(config: Described) -> JsonObject:
    """Return the options that determine the function that a model computes.

    Options that are null in the config have the values that the model derives, such as widths.
    """
    options = config.model_dump(mode="json", exclude={"type", *RUN_ONLY})
    if isinstance(config, ResnetConfig):
        derived = {"blocks": [*config.stages], "bottleneck": config.expansion > 1, "depth": None}
        return {**options, **derived, "groups": None if config.norm == "batch" else config.groups}
    if not isinstance(config, GptConfig):
        return {**options, "mlp": config.mlp or 4 * config.embed}
    derived = {
        "kv_heads": config.kv_heads or config.heads,
        "head_size": config.head_dim,
        "mlp": config.mlp_width,
    }
    experts: Any = options["experts"]
    if experts is not None:
        of_run = ("balance_loss", "z_loss", "product")
        own = {key: value for key, value in experts.items() if key not in of_run}
        options["experts"] = {**own, "mlp": experts["mlp"] or config.mlp_width}
    return {**options, **derived}


def families_of(config: Described) -> list[Family]:
    """Return the families whose config.json can describe a model."""
    wanted = architecture(config)
    known = [family for family in FAMILIES.values() if family.kind == config.type]
    return [family for family in known if describes(family.config(wanted), config)]


def describes(config: JsonObject, model: Described) -> bool:
    """Return whether a config.json describes a model with this config."""
    try:
        made = config_for(family_of(config, where="config.json").model(config))
    except ValueError:
        # The config.json may be of a model that jaxdist does not compute, such as the model of a
        # tokenizer.
        return False
    return made.type == model.type and architecture(made) == architecture(model)
