"""The base class of all sections of a configuration, and the validation of a document."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from jaxdist.config.document import Document, dotted, shown
from jaxdist.config.explain import Problem, explain_problems
from jaxdist.config.parse import MOST_PROBLEMS
from jaxdist.config.places import with_places
from jaxdist.errors import ConfigError


class Config(BaseModel):
    """A frozen section of the configuration, with strict types and without unknown keys.

    Each field has a description, which is the string under it, and, unless it is required, a
    default. A choice between sections is a union tagged by a literal field `type`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /
    ) -> JsonSchemaValue:
        """Return the JSON schema of the section, with the descriptions of its fields.

        With `use_attribute_docstrings`, pydantic would parse the source of each section at its
        import, and only the JSON schema needs the descriptions.
        """
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        texts: dict[str, str | None] = {}
        for base in reversed(cls.__mro__):
            if issubclass(base, Config):
                texts |= _descriptions(base)
        for name, field in cls.model_fields.items():
            # A section's own docstring is in its schema, so it is not repeated at the field.
            known = field.description or texts.get(name) in (None, inspect.getdoc(field.annotation))
            for key in () if known else {name, field.alias} & properties.keys():
                properties[key]["description"] = texts[name]
        return schema


@functools.cache
def _descriptions(section: type[Config]) -> dict[str, str | None]:
    """Return the string under each field that the body of a class declares, or None without one."""
    try:
        source = inspect.getsource(section)
    except (OSError, TypeError):
        return {}  # The class has no file, as in an interactive session.
    # The source of a class inside a function is indented.
    tree = ast.parse(f"if True:\n{source}" if source[0].isspace() else source)
    body = next(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {
        node.target.id: ast.get_docstring(ast.Module(body[at : at + 1], []))
        for at, node in enumerate(body, 1)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


LARGEST = 2**31 - 1
"""The largest count or size, since counts and sizes are 32-bit integers in compiled programs."""
Count = Annotated[int, Field(ge=1, le=LARGEST)]
"""An integer from 1 to `LARGEST`."""

MOST_NAME_BYTES, MOST_PATH_BYTES = 255, 4095


def _usable(path: Path) -> Path:
    """Return the path, after a check that a file system would accept it."""
    text = str(path)
    if "\0" in text:
        raise ValueError("the path contains a null character")
    for part in path.parts:
        size = len(os.fsencode(part))
        if size > MOST_NAME_BYTES:
            raise ValueError(
                f"a name in the path has {size} bytes; at most {MOST_NAME_BYTES} are allowed"
            )
    if len(os.fsencode(text)) > MOST_PATH_BYTES:
        raise ValueError(f"the path has more than {MOST_PATH_BYTES} bytes")
    return path


FilePath = Annotated[Path, AfterValidator(_usable)]
"""A path that is valid on a file system."""

Schema = TypeVar("Schema", bound=BaseModel)


def validate(document: Document, schema_class: type[Schema]) -> Schema:
    """Return the document as an instance of `schema_class`, after its validation.

    An integer is accepted for a float, text for a path, and a list for a tuple. Nothing else is
    converted.

    Raises:
      ConfigError: the document is not valid; the message has a line for each problem of the tree.

    >>> class Optim(Config):
    ...     lr: float
    >>> validate(Document({"lr": 1}), Optim)
    Optim(lr=1.0)
    """
    try:
        # The values are validated as JSON, for which the strict mode accepts text for a path and a
        # list for a tuple.
        return schema_class.model_validate_json(json.dumps(document.values))
    except ValidationError:
        found = explain_problems(schema_class, document.values)
        problems = with_places(found[:MOST_PROBLEMS], schema_class, document.values)
        problems = [*problems, *found[MOST_PROBLEMS:]]
        assert problems, "a failed validation explains itself"
        raise problems_error(document, problems) from None


def problems_error(document: Document, problems: Iterable[Problem]) -> ConfigError:
    """Return an error with a line for each problem: its path, value, origin and message.

    >>> document = Document({"batch": 7})
    >>> print(problems_error(document, [Problem(("batch",), "does not divide by 2 devices")]))
    1 problem in a config from Python:
      batch = 7 (a config from Python): does not divide by 2 devices
    """
    found = list(problems)
    lines = [_line(document, problem) for problem in found[:MOST_PROBLEMS]]
    if len(found) > MOST_PROBLEMS:
        lines.append(f"  and {len(found) - MOST_PROBLEMS} more")
    count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
    return ConfigError("\n".join([f"{count} in {document.origin(())}:", *lines]))


def _line(document: Document, problem: Problem) -> str:
    path = problem.path
    known, value = document.get(path)
    message = problem.message.replace("\n", "\n    ")
    if known == path:
        setting = f" = {shown(value)}" if path else ""
        return f"  {dotted(path)}{setting} ({document.sources(path)}): {message}"
    section = f"{dotted(known)}, " if known else ""
    return f"  {dotted(path)} (not set in {section}{document.sources(known)}): {message}"
