"""The families of published models in `families.toml`, and their keys of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from jaxdist.errors import ConfigError, DataError, did_you_mean
from jaxdist.interchange.encoders import ENCODERS
from jaxdist.interchange.family import OTHER_MODEL, Family, Inputs, read_family, table_rows
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

LLAMA_ROWS = table_rows("llama")
"""The entries of the table of names for llama, and for families that use the same names; no model
uses all of the entries.
"""
_SCALINGS: Mapping[str, Mapping[str, str]] = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_length",
    },
}
"""For each type of `rope_scaling`, the name of jaxdist's option for each key of config.json."""


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
    """Return the option `attention_window` for a config.json.

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


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        read_family("llama", more=_llama, written=_written_llama),
        read_family("mistral", more=_windowed, written=_written_window),
        read_family("mixtral", more=_mixtral, written=_written_mixtral),
        read_family("qwen2", more=_windowed, written=_written_window),
        read_family("qwen3", more=_qwen3, written=_written_qwen3),
        read_family("gemma", more=_llama, written=_written_llama),
        read_family("gpt2", more=lambda config: {"mlp": config["n_inner"] or 4 * config["n_embd"]}),
        *ENCODERS,
    )
}
"""Every family of published models, by the `model_type` in config.json."""
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
