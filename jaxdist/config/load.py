"""The merge of a YAML file, its includes and the overrides into a `Document`.

The top-level key `include` has a file or a list of files, as in `include: base.yaml`. Paths are
relative to the including file. Later includes override earlier includes, and the including file
overrides all its includes. If both values are mappings, they are merged key by key; the keys of the
base come first, then the new keys. Every other value is replaced. A mapping is replaced, not
merged, in two cases:

- Both mappings have a `type:`, and the types differ, so that the keys of the base have no meaning.
- The including file lists the mapping under `replace:`, as in `replace: [mesh]`, or by a dotted
path if the mapping is inside another mapping.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxdist.config.document import Document, KeyPath, Node, Origin, dotted, shown
from jaxdist.config.files import path_kind
from jaxdist.config.given import node_of
from jaxdist.config.override import apply_override
from jaxdist.config.parse import MAX_BYTES, parse_yaml
from jaxdist.config.shipped import shipped, shipped_name
from jaxdist.errors import ConfigError, closest

MAX_FILES = 64

RUN_CONFIG = "config.yaml"
"""The name of the config file in a run directory."""


def read(
    path: str | os.PathLike[str] | Mapping[str, Any] | None, overrides: Iterable[str] = ()
) -> Document:
    """Return the merged values of a YAML file, each with its origin, without validation.

    Args:
      path: the path of a YAML 1.2 file of UTF-8 text or of a run directory with `config.yaml`, or
        the values of such a file, as `jaxdist.config.given.node_of` accepts them. None reads only
        the overrides. A file and its includes have at most MAX_BYTES bytes together.
      overrides: the texts `section.key=value`, which are applied in order after all includes.

    Raises:
      ConfigError: a file is missing, unreadable or not plain YAML; includes form a cycle; or an
        override does not fit the values.
    """
    file, loader = None, _Loader()
    if path is None:
        root = Node({}, Origin("the defaults"))
    elif isinstance(path, Mapping):
        root = node_of(path)
    else:
        file = Path(path)
        own = file / RUN_CONFIG
        # `Path.is_file` is not used, because it raises an error for a name that is too long.
        file = own if os.path.isfile(own) else file
        root = loader.load(file, None, ())
    for text in overrides:
        root = apply_override(root, text)
    return Document(root.plain(), root.origins(), file, tuple(loader.files))


def _merge(base: Node, child: Node, replaced: frozenset[KeyPath], path: KeyPath = ()) -> Node:
    """Return `child` merged over `base`, by the rules in the docstring of this module."""
    if not (isinstance(base.value, dict) and isinstance(child.value, dict)) or path in replaced:
        return child
    types = [side.value["type"].plain() for side in (base, child) if "type" in side.value]
    if len(types) == 2 and types[0] != types[1]:
        return child
    merged = dict(base.value)
    for key, node in child.value.items():
        merged[key] = _merge(merged[key], node, replaced, (*path, key)) if key in merged else node
    return Node(merged, child.origin)


class _Loader:
    def __init__(self) -> None:
        self.files: list[Path] = []
        self.left_bytes = MAX_BYTES

    def load(self, file: Path, asked: Origin | None, chain: tuple[Path, ...]) -> Node:
        name = _display(file)
        place = f"{asked}: include: " if asked else ""
        data = _read_bytes(file, place, self.left_bytes)
        self.left_bytes -= len(data)
        text = _decoded(data, f"{place}{name}")
        # Real paths are compared, since with symbolic links a file of a cycle could have several
        # names.
        if os.path.realpath(file) in [os.path.realpath(seen) for seen in chain]:
            cycle = " -> ".join(_display(seen) for seen in (*chain, file))
            raise ConfigError(f"{place}files include each other: {cycle}; break the cycle")
        self.files.append(file)
        if len(self.files) > MAX_FILES:
            raise ConfigError(
                f"{place}more than {MAX_FILES} files are included in total: include fewer files"
            )
        root = parse_yaml(text, lambda line: Origin(name, line))
        if root.value is None:
            root = Node({}, Origin(name))
        if not isinstance(root.value, dict):
            found = "a list" if isinstance(root.value, list) else shown(root.value)
            raise ConfigError(
                f"{root.origin}: the top level must be a mapping (`key: value` lines), "
                f"found {found}"
            )
        values = dict(root.value)
        includes = _texts(values.pop("include", None), "include", "file names")
        replaced = _replaced(values.pop("replace", None), values, bool(includes))
        merged = Node({}, Origin(name))
        for include, origin in includes:
            base = self.load(file.parent / include, origin, (*chain, file))
            merged = _merge(merged, base, frozenset())
        return _merge(merged, Node(values, Origin(name)), replaced)


def _texts(node: Node | None, key: str, what: str) -> list[tuple[str, Origin]]:
    if node is None:
        return []
    items = node.value if isinstance(node.value, list) else [node]
    for item in items:
        if not isinstance(item.value, str) or not item.value:
            found = shown(item.plain())
            raise ConfigError(
                f"{item.origin}: {key} must be text or a list of texts ({what}), but is {found}"
            )
    return [(item.value, item.origin) for item in items]


def _replaced(node: Node | None, values: dict[str, Node], included: bool) -> frozenset[KeyPath]:
    paths: set[KeyPath] = set()
    for text, origin in _texts(node, "replace", "dotted paths"):
        path = tuple(text.split("."))
        at: Node | None = Node(values, origin)
        for key in path:
            at = at.value.get(key) if at is not None and isinstance(at.value, dict) else None
        if at is None:
            raise ConfigError(
                f"{origin}: the key replace lists {dotted(path)}, which this file does not set: "
                "set the path in this file, or remove the path from replace"
            )
        if not included:
            raise ConfigError(f"{origin}: replace has no effect without include; remove replace")
        paths.add(path)
    return frozenset(paths)


def _read_bytes(file: Path, place: str, most: int) -> bytes:
    name = _display(file)
    if "\0" in str(file):
        raise ConfigError(f"{place}{name!r}: the file name contains a null character")
    try:
        if kind := path_kind(file):
            raise ConfigError(f"{place}{name} is {kind}; name a YAML file")
        with file.open("rb") as stream:
            # One byte more than the limit shows that a file is too large, without a read of the
            # whole file.
            data = stream.read(most + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{place}{name}: no such file{_suggestion(file, place)}") from None
    except OSError as error:
        raise ConfigError(
            f"{place}{name}: cannot be read: {error.strerror}; name a YAML file"
        ) from None
    # The size is checked before the file is parsed, which takes seconds for a megabyte.
    if len(data) > most:
        also = "" if most == MAX_BYTES else ", together with the files before it"
        raise ConfigError(
            f"{place}{name} is larger than {MAX_BYTES} bytes{also}, the most that a config may "
            "have; write a smaller file"
        )
    return data


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name}: the file is not UTF-8 text (byte 0x{data[error.start]:02x} at offset "
            f"{error.start}); save the file as UTF-8"
        ) from None


def _suggestion(file: Path, place: str) -> str:
    if not place and shipped_name(file) in shipped():
        return (
            f"; `jaxdist init {shipped_name(file)}` writes this file, or with --to writes it into "
            "another folder"
        )
    here = not place and (len(file.parts) == 1 or file.parts[0] == "configs")
    init = "; `jaxdist init` writes the shipped configs to configs" if here else ""
    try:
        names = sorted(name for name in os.listdir(file.parent) if name.endswith((".yaml", ".yml")))
    except OSError:
        return (
            f" (there is no folder {_display(file.parent)} to read){init or '; name a YAML file'}"
        )
    match = closest(file.name, names)
    if match:
        return f"; did you mean {_display(file.parent / match)!r}?"
    there = f"; in {_display(file.parent)} there are: {', '.join(names)}" if names else ""
    return f"{there}{init}"


def _display(file: Path) -> str:
    return os.path.normpath(file).encode("utf-8", "backslashreplace").decode()
