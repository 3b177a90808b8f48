"""A configuration that a program passes: plain values, and the user's classes and functions."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from jaxdist.config.document import KeyPath, Node, Origin, dotted, shown
from jaxdist.errors import ConfigError

PYTHON = Origin("a config from Python")


def node_of(value: Any, path: KeyPath = ()) -> Node:
    """Return the values of a program in the form of a document.

    A path becomes text. A class or a function becomes its import path.

    Raises:
      ConfigError: a value could not be in a config file, or a class or function has no name in its
        module.

    >>> node_of({"data": {"files": ("a.txt",)}}).plain()
    {'data': {'files': ['a.txt']}}
    >>> node_of({"path": PurePath}).plain()
    {'path': 'pathlib:PurePath'}
    """
    if isinstance(value, Mapping):
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None:
            raise ConfigError(f"{dotted(path)} ({PYTHON}): a key must be text, not {wrong!r}")
        return Node({key: node_of(item, (*path, key)) for key, item in value.items()}, PYTHON)
    if isinstance(value, list | tuple):
        return Node([node_of(item, (*path, at)) for at, item in enumerate(value)], PYTHON)
    if value is None or isinstance(value, bool | int | float | str):
        return Node(value, PYTHON)
    if isinstance(value, PurePath):
        return Node(str(value), PYTHON)
    if callable(value):
        return Node(import_path(value, path), PYTHON)
    raise ConfigError(
        f"{dotted(path)} = {shown(value)} ({PYTHON}): a config holds numbers, text, lists, dicts, "
        f"and classes or functions of your own, but this is a {type(value).__name__}"
    )


def import_path(value: Any, path: KeyPath = ()) -> str:
    """Return the import path of a class or function.

    Args:
      path: the path of the setting, for the message.

    Raises:
      ConfigError: the class or function is not found in its module under its name.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value:
        raise ConfigError(
            f"{dotted(path)} = {shown(value)} ({PYTHON}): a run can be resumed only with classes "
            "and functions that have a name in a module. Define the object at the top level of a "
            "module or notebook, and pass the values that it depends on as args"
        )
    return f"{module}:{name}"
