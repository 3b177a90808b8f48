"""The reader of `--set key=value` texts, which parses each value by the type of the setting."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from types import NoneType
from typing import Any

from jaxdist.config.describe import (
    arms,
    fields,
    is_mapping,
    is_model,
    is_sequence,
    split_annotation,
)
from jaxdist.config.document import Document, Node, Origin, shown
from jaxdist.config.override import apply_override
from jaxdist.config.schema import Config
from jaxdist.launch.contract import Engine


def read_engine_settings(name: str, kind: type[Engine], texts: Sequence[str]) -> Document:
    """Return the settings of an engine from texts, before the settings are validated.

    The value of a list is split at its commas. A value that begins with `-` is split only at commas
    before another option. Values of text settings and of environment variables are used unchanged.
    All other values are read as YAML, including lists in brackets and quoted text.

    Args:
      name: the name of the engine.
      kind: the class of the engine.
      texts: the texts `key=value`.

    Raises:
      ConfigError: a text has no `=`, or its value is not YAML.
    """
    root = Node({}, Origin(f"the settings of --on {name} (--set)"))
    for text in texts:
        root = apply_override(root, _as_yaml(kind, text), Origin(f"--set {shown(text)}"))
    return Document(root.plain(), root.origins())


def _as_yaml(kind: type[Config], text: str) -> str:
    """Return a text `key=value` with its value in YAML."""
    key, equals, value = text.partition("=")
    first, _, rest = key.partition(".")
    info = fields(kind).get(first.strip())
    if not equals or info is None or value[:1] in ("", "[", "{", "'", '"'):
        return text
    types: list[Any] = [split_annotation(arm)[0] for arm in arms(info.annotation)]
    if rest and is_model(types[0]):
        return f"{first}.{_as_yaml(types[0], f'{rest}={value}')}"
    if rest:
        # The quotes of JSON, which YAML can read, keep a value such as `1e3` or `true` as text.
        return f"{key}={json.dumps(value)}" if is_mapping(types[0]) else text
    if is_sequence(types[0]):
        return f"{key}={json.dumps(_listed(value))}"
    if set(types) <= {str, NoneType} and value != "null":
        return f"{key}={json.dumps(value)}"
    return text


def _listed(text: str) -> list[str]:
    """Split a text at its commas; if it begins with `-`, split it only at commas before an option.

    >>> _listed("a, b"), _listed("--mem=0,--exclude=n1,n2")
    (['a', 'b'], ['--mem=0', '--exclude=n1,n2'])
    """
    comma = r",(?=\s*-)" if text.startswith("-") else ","
    return [item.strip() for item in re.split(comma, text)]
