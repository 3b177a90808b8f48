"""A family of published models: its names and layouts of tensors, and its keys of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxdist.errors import ConfigError
from jaxdist.types import JsonObject


class Row(NamedTuple):
    """The tensor of a parameter, its layout, and its index in a tensor of several parameters.

    Attributes:
      absent: whether files of the model without its head lack the tensor; the parameter then
        begins at 0.
    """

    tensor: str
    layout: str
    part: int | None = None
    absent: bool = False


class Inputs(NamedTuple):
    """The sizes of what a model reads and predicts.

    Attributes:
      vocab_size: number of tokens; 0 for models of images.
      classes: number of classes; 0 for models of tokens alone.
      image: height, width and channels of an image, or None for models of tokens.
    """

    vocab_size: int = 0
    classes: int = 0
    image: tuple[int, int, int] | None = None


def block(prefix: str, names: Mapping[str, tuple[str, str]]) -> dict[str, Row]:
    """Return the rows of a block's parameters, whose tensors' names begin with `prefix`."""
    return {f"blocks/{own}": Row(f"{prefix}{name}", how) for own, (name, how) in names.items()}


def tokens_of(config: Mapping[str, Any]) -> Inputs:
    """Return the size of the vocabulary of a config.json.

    Raises:
      ConfigError: it has no valid vocab_size.
    """
    return Inputs(positive(config, "vocab_size"))


def written_tokens(given: Inputs) -> JsonObject:
    """Return the keys of config.json for the size of a vocabulary."""
    return {"vocab_size": given.vocab_size}


def positive(config: Mapping[str, Any], key: str, missing: int | None = None) -> int:
    """Return a key of a config.json that is a whole number from 1.

    Raises:
      ConfigError: the key is absent or has another value.
    """
    size = config.get(key, missing)
    if type(size) is not int or size < 1:
        has = "has no" if key not in config else f"has {size!r} for"
        raise ConfigError(f"config.json {has} {key}; give the model's own, a number from 1")
    return size


@dataclass(frozen=True)
class Family:
    """A published architecture as a choice of options of one of our models.

    Attributes:
      rows: tensor and layout of each parameter, or a function from a config.json to them.
      keys: options of our model by key of config.json.
      options: options that all models of the family have.
      fixed: allowed values of other keys; a config.json is written with the first value.
      missing: values of keys that a config.json may leave out.
      ignored: suffixes of the names of tensors that hold no parameter.
      prefix: prefix of names that is absent in files of the model without its head.
      more: function from a config.json to further options of our model.
      written: function from options of our model to further keys of config.json.
      kind: our model, by `model.type`.
      inputs: function from a config.json to the sizes of what the model reads and predicts.
      written_inputs: function from these sizes to keys of config.json.
      older: present endings of tensors' names by those that older files have.
    """

    name: str
    architecture: str
    rows: Mapping[str, Row] | Callable[[Mapping[str, Any]], Mapping[str, Row]]
    keys: Mapping[str, str]
    options: JsonObject
    fixed: Mapping[str, tuple[Any, ...]]
    missing: JsonObject = field(default_factory=dict)
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    prefix: str = "model."
    more: Callable[[Mapping[str, Any]], JsonObject] = lambda config: {}
    written: Callable[[JsonObject], JsonObject] = lambda options: {}
    kind: str = "gpt"
    inputs: Callable[[Mapping[str, Any]], Inputs] = tokens_of
    written_inputs: Callable[[Inputs], JsonObject] = written_tokens
    older: Mapping[str, str] = field(default_factory=dict)

    def table(self, config: Mapping[str, Any]) -> Mapping[str, Row]:
        """Return the tensor and the layout of each parameter for a config.json."""
        rows = self.rows({**self.missing, **config}) if callable(self.rows) else self.rows
        if not any("For" in str(name) for name in config.get("architectures") or ()):
            return rows
        return {own: row._replace(absent=False) for own, row in rows.items()}

    def model(self, config: Mapping[str, Any]) -> JsonObject:
        """Return the section `model` of a config for a config.json.

        Raises:
          ConfigError: a config.json that lacks a key, or has a value that our model does not
            compute.
          DataError: a scaling of rotary positions that lacks a key.
        """
        given = {**self.missing, **config}
        for key, allowed in self.fixed.items():
            if given.get(key, allowed[0]) not in allowed:
                listed = " or ".join(map(repr, allowed))
                raise ConfigError(
                    f"config.json: {key} is {given[key]!r}, but of the family {self.name} "
                    f"model.type {self.kind} computes {listed}"
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
        """Return the keys of config.json for options of our model."""
        found = {key: options[own] for key, own in self.keys.items()}
        fixed = {key: allowed[0] for key, allowed in self.fixed.items()}
        return {
            "architectures": [self.architecture],
            "model_type": self.name,
            **fixed,
            **found,
            **self.written(options),
        }
