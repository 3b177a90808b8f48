"""The resolved configuration as text for people, for the run directory and for editors."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pydantic import BaseModel
from rich.cells import cell_len, set_cell_size
from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from jaxdist.config.document import Document, KeyPath, Origin, dotted
from jaxdist.config.parse import plain_scalar
from jaxdist.types import Annotation, Json, JsonObject

DEFAULT = Origin("default")


@dataclass(frozen=True)
class ResolvedValue:
    """A value of the resolved tree, which is a scalar, a list of scalars, or an empty container."""

    path: KeyPath
    value: Json
    origin: Origin


def provenance(document: Document, instance: BaseModel) -> list[ResolvedValue]:
    """Return the values of the validated tree as rows, in the order of the fields.

    Values that are not in the document have the origin `DEFAULT`.

    >>> class Optim(BaseModel):
    ...     lr: float = 0.1
    ...     momentum: float = 0.9
    >>> document = Document({"lr": 1}, {("lr",): Origin("x.yaml", 1)})
    >>> for row in provenance(document, Optim(lr=1)):
    ...     print(dotted(row.path), row.value, row.origin)
    lr 1.0 x.yaml:1
    momentum 0.9 default
    """
    return list(_rows(document, _plain(instance), ()))


def render_rows(rows: Iterable[ResolvedValue], width: int = 80) -> str:
    """Return aligned lines `path  value  origin`, none wider than `width` terminal cells.

    A text that is too long is cut at its end, with an ellipsis. An origin with a line is cut at its
    start, since the number of the line at its end is more important.
    """
    rows = list(rows)
    cells = [(dotted(row.path), value_text(row.value), str(row.origin)) for row in rows]
    if not cells:
        return ""
    path_cells, value_cells, origin_cells = (
        max(cell_len(text) for text in column) for column in zip(*cells, strict=True)
    )
    path_cells = min(path_cells, width * 2 // 5)
    origin_cells = min(origin_cells, max(width // 3, width - 4 - path_cells - value_cells))
    value_cells = min(value_cells, width - 4 - path_cells - origin_cells)
    lines = []
    for row, (path, value, origin) in zip(rows, cells, strict=True):
        fit_origin = _fit if row.origin.line is None else _fit_end
        columns = _fit(path, path_cells), _fit(value, value_cells), fit_origin(origin, origin_cells)
        lines.append("  ".join(columns).rstrip())
    return "\n".join(lines)


def resolved_yaml(instance: BaseModel) -> str:
    """Return the complete tree, with defaults, as YAML that loads to an equal instance.

    >>> class Optim(BaseModel):
    ...     lr: float = 1e-5
    ...     name: str = "on"
    >>> print(resolved_yaml(Optim()), end="")
    lr: 1e-05
    name: on
    """
    return plain_yaml(_plain(instance))


def plain_yaml(values: Json) -> str:
    """Return plain values as YAML that loads to equal values.

    >>> print(plain_yaml({"mesh": {"data": 2}, "hidden": [3, 5]}), end="")
    mesh:
      data: 2
    hidden:
    - 3
    - 5
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.allow_unicode = True
    yaml.width = sys.maxsize  # Folded text would be hard to read and to edit.
    yaml.sort_base_mapping_type_on_output = False  # pyright: ignore[reportAttributeAccessIssue] (untyped in ruamel)
    stream = io.StringIO()
    yaml.dump(values, stream)
    return stream.getvalue()


def json_schema(schema_class: type[BaseModel]) -> str:
    """Return the JSON schema (draft 2020-12) of a configuration file, for editors.

    The schema checks keys, types and bounds, but not whether required values are present, since a
    value that a file lacks may come from an `include:`. A load checks this in the merged tree.
    """
    schema = _for_partial_files(schema_class.model_json_schema())
    texts = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    told = {
        "include": "Files whose values this file overrides. Their paths are relative to this file.",
        "replace": "Dotted paths of mappings that replace the mappings of included files, instead "
        "of being merged with them.",
    }
    directives = {name: {"description": text, **texts} for name, text in told.items()}
    schema["properties"] = directives | schema.get("properties", {})
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(dialect | schema, indent=2, ensure_ascii=False) + "\n"


class _Representer(SafeRepresenter):
    """A representer that escapes unprintable text, parts of which ruamel turns into line breaks."""

    def represent_str(self, data: str) -> ScalarNode:
        style = None if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Representer.add_representer(str, _Representer.represent_str)


def _plain(instance: BaseModel) -> JsonObject:
    return instance.model_dump(mode="json", by_alias=True)


def _rows(document: Document, value: Json, path: KeyPath) -> Iterator[ResolvedValue]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _rows(document, child, (*path, key))
    elif isinstance(value, list) and (_nested(value) or _mixed(document, value, path)):
        for index, child in enumerate(value):
            yield from _rows(document, child, (*path, index))
    else:
        yield ResolvedValue(path, value, _origin(document, path))


def _origin(document: Document, path: KeyPath) -> Origin:
    known, value = document.get(path)
    # If `path` is not in the document, a validator expanded the scalar that the user wrote at a
    # prefix of `path`.
    written = known == path or (known and not isinstance(value, dict | list))
    return document.origin(path) if written else DEFAULT


def _nested(items: list[Json]) -> bool:
    return any(isinstance(item, dict | list) and item for item in items)


def _mixed(document: Document, items: list[Json], path: KeyPath) -> bool:
    sources = {_origin(document, (*path, index)).source for index in range(len(items))}
    return len(sources | {_origin(document, path).source}) > 1


def value_text(value: Json) -> str:
    """Return a value in the form of an override: JSON, or text if it needs no quotes."""
    if isinstance(value, str) and value.isprintable() and plain_scalar(value) == value != "":
        return value
    return json.dumps(value, ensure_ascii=False)


def _fit(text: str, cells: int) -> str:
    if cell_len(text) <= cells:
        return set_cell_size(text, cells)
    return set_cell_size(set_cell_size(text, cells - 1).rstrip() + "…", cells)


def _fit_end(text: str, cells: int) -> str:
    if cell_len(text) <= cells:
        return text
    while cell_len(text) > cells - 1:
        text = text[1:]
    return f"…{text}"


def _for_partial_files(schema: Annotation) -> Annotation:
    """Return a JSON schema for files with only a part of a config.

    Nothing is required, and a section without its tag matches any alternative.
    """
    if isinstance(schema, list):
        return [_for_partial_files(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    partial = {}
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            partial[key] = {name: _for_partial_files(inner) for name, inner in value.items()}
        # These keys contain values and not schemas, so a key `required` within them is data and not
        # a keyword of JSON Schema.
        elif key in ("default", "enum", "const", "examples"):
            partial[key] = value
        elif key not in ("required", "discriminator"):
            partial["anyOf" if key == "oneOf" else key] = _for_partial_files(value)
    return partial
