"""The differences between two resolved configs."""

from __future__ import annotations

from ruamel.yaml import YAML

from jaxdist.config.document import flat
from jaxdist.types import JsonObject


def changes(before: JsonObject, after: str) -> list[str]:
    """Return a line `path: old -> new` for each value that differs between two configs.

    Args:
      before: the values of the older config.
      after: the YAML text of the newer, resolved config.

    >>> changes({"a": {"b": 1, "c": 2}}, "a: {b: 1, c: 3}")
    ['a.c: 2 -> 3']
    """
    old, new = flat(before), flat(YAML(typ="safe").load(after) or {})
    return [
        f"{path}: {old.get(path)} -> {new.get(path)}"
        for path in {**old, **new}
        if old.get(path) != new.get(path)
    ]
