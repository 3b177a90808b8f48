"""What differs between two resolved configurations."""

from __future__ import annotations

from ruamel.yaml import YAML

from jaxdist.types import Json, JsonObject


def _flat(value: Json, path: str = "") -> JsonObject:
    if isinstance(value, dict) and value:
        found: JsonObject = {}
        for key, child in value.items():
            found |= _flat(child, f"{path}.{key}" if path else str(key))
        return found
    return {path: value}


def changes(before: str, after: str) -> list[str]:
    """Lines `path: old -> new` for each value that differs between two YAML texts.

    >>> changes("a: {b: 1, c: 2}", "a: {b: 1, c: 3}")
    ['a.c: 2 -> 3']
    """
    old, new = (_flat(YAML(typ="safe").load(text) or {}) for text in (before, after))
    return [
        f"{path}: {old.get(path)} -> {new.get(path)}"
        for path in {**old, **new}
        if old.get(path) != new.get(path)
    ]
