"""A family of published models: its names and layouts of tensors, and its keys of config.json."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxdist.errors import ConfigError
from jaxdist.types import JsonObject


class Row(NamedTuple):
    """A row of a table: the tensor that fills a parameter, and the tensor's layout.

    Attributes:
      tensor: the name of the tensor.
      layout: the order of the elements, as in `jaxdist.interchange.layouts`.
      part: the index of the parameter in a tensor that holds several parameters, or None if the
        tensor holds a single parameter.
      absent: whether the tensor is missing in files of the model without its head; the initial
        value of the parameter is then 0.
    """

    tensor: str
    layout: str
    part: int | None = None
    absent: bool = False


OTHER_MODEL = "Import other models with --config and --table, as models of your own"
"""The remedy in the error about a model whose family jaxdist cannot compute with its options."""


class Inputs(NamedTuple):
    """The sizes of a model's inputs and predictions.

    Attributes:
      vocab_size: the number of tokens, or 0 for models of images.
      classes: the number of classes, or 0 for models that predict tokens.
      image: the height, width and channels of an image, or None for models of tokens.
    """

    vocab_size: int = 0
    classes: int = 0
    image: tuple[int, int, int] | None = None


def tokens_of(config: Mapping[str, Any]) -> Inputs:
    """Return the sizes of a model of tokens, given its config.json.

    Raises:
      ConfigError: config.json has no valid vocab_size.
    """
    return Inputs(positive(config, "vocab_size"))


def written_tokens(given: Inputs) -> JsonObject:
    """Return the keys of config.json for the size of a vocabulary."""
    return {"vocab_size": given.vocab_size}


def positive(config: Mapping[str, Any], key: str, missing: int | None = None) -> int:
    """Return the value of a key of a config.json, which must be a whole number from 1.

    Args:
      missing: the value of an absent key, or None if the key is required.

    Raises:
      ConfigError: the key is absent but required, or its value is not a whole number of at least 1.
    """
    size = config.get(key, missing)
    if type(size) is not int or size < 1:
        has = "has no" if key not in config else f"has {size!r} for"
        raise ConfigError(f"config.json {has} {key}: set {key} to the model's number, at least 1")
    return size


@dataclass(frozen=True)
class Family:
    """A published architecture, which one of jaxdist's models computes with certain options.

    Attributes:
      name: the `model_type` in config.json.
      architecture: the class in the library transformers that config.json names.
      rows: the row of each parameter, or a function from a config.json to these rows.
      keys: the options of jaxdist's model, by key of config.json.
      options: the options that all models of the family have.
      fixed: the allowed values of other keys; a config.json is written with the first value.
      missing: the values of keys that a config.json may omit.
      ignored: the suffixes of the names of tensors that fill no parameter.
      prefix: the prefix of tensors' names that is absent in files of the model without its head.
      more: the function that returns, for a config.json, the options of jaxdist's model that
        neither `keys` nor `options` give.
      written: the function that returns, for the options of jaxdist's model, the keys of
        config.json that `keys` does not give.
      kind: the `model.type` of jaxdist's model.
      inputs: a function from a config.json to the sizes of the model's inputs and predictions.
      written_inputs: a function from these sizes to keys of config.json.
      older: the present ending of a tensor's name, by the ending in older files.
    """

    name: str
    architecture: str
    rows: Mapping[str, Row] | Callable[[Mapping[str, Any]], Mapping[str, Row]]
    keys: Mapping[str, str]
    options: JsonObject = field(default_factory=dict)
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    missing: JsonObject = field(default_factory=dict)
    ignored: Sequence[str] = ("rotary_emb.inv_freq",)
    prefix: str = "model."
    more: Callable[[Mapping[str, Any]], JsonObject] = lambda config: {}
    written: Callable[[JsonObject], JsonObject] = lambda options: {}
    kind: str = "gpt"
    inputs: Callable[[Mapping[str, Any]], Inputs] = tokens_of
    written_inputs: Callable[[Inputs], JsonObject] = written_tokens
    older: Mapping[str, str] = field(default_factory=dict)

    def table(self, config: Mapping[str, Any]) -> Mapping[str, Row]:
        """Return the entry of the table of names for each parameter, given a config.json."""
        rows = self.rows({**self.missing, **config}) if callable(self.rows) else self.rows
        if not any("For" in str(name) for name in config.get("architectures") or ()):
            return rows
        return {own: row._replace(absent=False) for own, row in rows.items()}

    def model(self, config: Mapping[str, Any]) -> JsonObject:
        """Return the section `model` of a config for a config.json.

        Raises:
          ConfigError: config.json lacks a key, or has a value that jaxdist's model does not
            compute.
          DataError: a scaling of rotary positions lacks a key.
        """
        given = {**self.missing, **config}
        for key, allowed in self.fixed.items():
            if given.get(key, allowed[0]) not in allowed:
                listed = " or ".join(map(repr, allowed))
                raise ConfigError(
                    f"config.json: {key} is {given[key]!r}, but for the family {self.name}, "
                    f"model.type {self.kind} computes {listed}. {OTHER_MODEL}"
                )
        lacking = [key for key in self.keys if key not in given]
        if lacking:
            raise ConfigError(
                f"config.json of the family {self.name} lacks {', '.join(lacking)}: download the "
                "model's own config.json"
            )
        found = {own: given[key] for key, own in self.keys.items()}
        return {"type": self.kind, **self.options, **found, **self.more(given)}

    def config(self, options: JsonObject) -> JsonObject:
        """Return the config.json for options of jaxdist's model, without the sizes of inputs."""
        found = {key: options[own] for key, own in self.keys.items()}
        fixed = {key: allowed[0] for key, allowed in self.fixed.items()}
        return {
            "architectures": [self.architecture],
            "model_type": self.name,
            **fixed,
            **found,
            **self.written(options),
        }


_TABLE = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))


@cache
def table_rows(*names: str) -> Mapping[str, Row]:
    """Return each parameter's row in the tables `names` of `families.toml`; later tables win."""
    found: dict[str, Row] = {}
    for name in names:
        rows = dict(_TABLE["rows"][name])
        blocks = dict(rows.pop("blocks"))
        prefix = blocks.pop("prefix")
        found |= {own: _row(*given) for own, given in rows.items()}
        found |= {f"blocks/{n}": _row(f"{prefix}{t}", *how) for n, (t, *how) in blocks.items()}
    return found


def _row(tensor: str, layout: str = "", more: int | Literal["absent"] | None = None) -> Row:
    return Row(tensor, layout, absent=True) if more == "absent" else Row(tensor, layout, more)


def read_family(name: str, **functions: Any) -> Family:
    """Return the family that `families.toml` describes under a name.

    Args:
      name: the name of the family.
      functions: the fields of `Family` that are functions, by name.
    """
    given = {key: _plain(value) for key, value in _TABLE["families"][name].items()}
    if isinstance(given["keys"], str):
        given["keys"] = _TABLE["keys"][given["keys"]]
    if "rows" in given:
        given["rows"] = table_rows(*given["rows"])
    return Family(name, **{**given, **functions})


def _plain(value: Any) -> Any:
    """Return a value of `families.toml`, with None for the text "null"."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [*map(_plain, value)]
    return None if value == "null" else value
