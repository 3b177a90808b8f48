"""What differs between two resolved configurations."""

from __future__ import annotations

from ruamel.yaml import YAML

from jaxdist.config.document import flat
from jaxdist.types import JsonObject


def changes(before: JsonObject, after: str) -> list[str]:
    """Return lines `path: old -> new` for each value that differs.

    Args:
      before: values as a file of an earlier time had them.
      after: YAML of values that are resolved now.

    >>> changes({"a": {"b": 1, "c": 2}}, "a: {b: 1, c: 3}")
    ['a.c: 2 -> 3']
    """
    old, new = flat(before), flat(YAML(typ="safe").load(after) or {})
    return [
        f"{path}: {old.get(path)} -> {new.get(path)}"
        for path in {**old, **new}
        if old.get(path) != new.get(path)
    ]
