"""A configuration as plain values before validation, with the origin of each value."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxdist.types import Json, JsonObject

Key = str | int
KeyPath = tuple[Key, ...]

SHOWN_CHARS = 60
OVERRIDE = "override "

_PLAIN_KEY = re.compile(r"[\w-]+")


def dotted(path: KeyPath) -> str:
    """Return a path as text for people; keys that would be ambiguous are quoted.

    >>> dotted(("data", "files", 0)), dotted(("a.b",)), dotted(())
    ('data.files.0', "'a.b'", '(top level)')
    """
    parts = (str(key) if _PLAIN_KEY.fullmatch(str(key)) else repr(key) for key in path)
    return ".".join(parts) or "(top level)"


def value_at(values: Mapping[str, Json], path: Sequence[Key]) -> Json:
    """Return the value at a path, or None for a path that is not set.

    >>> value_at({"a": {"b": 1}}, ("a", "b")), value_at({"a": None}, ("a", "b"))
    (1, None)
    """
    found: Json = values
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def flat(value: Json, path: str = "") -> JsonObject:
    """Return the leaves of nested mappings by dotted path; an empty mapping is a leaf.

    >>> flat({"a": {"b": 1}, "c": [], "d": {}})
    {'a.b': 1, 'c': [], 'd': {}}
    """
    if isinstance(value, dict) and value:
        found: JsonObject = {}
        for key, child in value.items():
            found |= flat(child, f"{path}.{key}" if path else str(key))
        return found
    return {path: value}


def keys_of(value: Json) -> Collection[Key]:
    """Return the keys of a mapping, the indices of a list, or () for a scalar."""
    if isinstance(value, dict):
        return value.keys()
    return range(len(value)) if isinstance(value, list) else ()


def shown(value: Json) -> str:
    """Return a value as text for a message: its repr, cut after `SHOWN_CHARS` characters."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"


@dataclass(frozen=True)
class Origin:
    """The origin of a value: a file and its line (counted from 1), or the text of an override.

    >>> str(Origin("configs/gpt/base.yaml", 12)), str(Origin("override 'optim.lr=1'"))
    ('configs/gpt/base.yaml:12', "override 'optim.lr=1'")
    """

    source: str
    line: int | None = None

    @property
    def overrides(self) -> bool:
        """Whether the value comes from an override on the command line."""
        return self.line is None and self.source.startswith(OVERRIDE)

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Node:
    """A value with its origin; `value` is a scalar, a dict of Nodes or a list of Nodes."""

    value: Json
    origin: Origin

    def plain(self) -> Json:
        """Return the value as plain data, without origins."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def origins(self, path: KeyPath = ()) -> dict[KeyPath, Origin]:
        """Return the origins of this value and of all values below it, by path."""
        found = {path: self.origin}
        children = self.value.items() if isinstance(self.value, dict) else ()
        if isinstance(self.value, list):
            children = enumerate(self.value)
        for key, child in children:
            found |= child.origins((*path, key))
        return found


@dataclass(frozen=True)
class Document:
    """A configuration before validation: the result of `read`, and the argument of `validate`.

    Attributes:
      values: nested dicts (text keys), lists, text, numbers, booleans and None.
      origins: the origin of each path of `values`; some paths may have no origin.
      path: the file that was read, or None for values from a program.
      files: the file that was read and all files that it includes, even if overrides replace all
        values of a file.
    """

    values: JsonObject
    origins: Mapping[KeyPath, Origin] = field(default_factory=dict)
    path: Path | None = None
    files: tuple[Path, ...] = ()

    def origin(self, path: KeyPath) -> Origin:
        """Return the origin of a path, or of its nearest ancestor with an origin.

        If no origin is found, return an origin that names the file or Python.

        >>> document = Document({"a": {"b": 1}}, {("a",): Origin("x.yaml", 3)}, Path("x.yaml"))
        >>> str(document.origin(("a", "b"))), str(document.origin(("c",)))
        ('x.yaml:3', 'x.yaml')
        >>> str(Document({}).origin(("c",)))
        'a config from Python'
        """
        for length in range(len(path), -1, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return Origin("a config from Python" if self.path is None else str(self.path))

    def sources(self, path: KeyPath) -> str:
        """Return the origin of a path, and the overrides of values below the path, as text.

        A section begins in a file, but the cause of a problem may be one of its overrides.

        >>> origins = {("a",): Origin("x.yaml", 3), ("a", "b"): Origin("override 'a.b=1'")}
        >>> Document({"a": {"b": 1}}, origins, Path("x.yaml")).sources(("a",))
        "x.yaml:3, override 'a.b=1'"
        """
        below = [one for at, one in self.origins.items() if path and at[: len(path)] == path]
        overrides = [str(one) for one in below if one.overrides]
        return ", ".join(dict.fromkeys([str(self.origin(path)), *overrides]))

    def get(self, path: KeyPath) -> tuple[KeyPath, Json]:
        """Return the longest prefix of a path that is set, and the value at this prefix."""
        value: Json = self.values
        for depth, key in enumerate(path):
            if key not in keys_of(value):
                return path[:depth], value
            value = value[key]
        return path, value
