"""Explanations, for the user, of the validation errors that pydantic detects.

An error in a union is explained once, for the alternative that was probably intended: the
alternative that `type:` names, or the alternative whose shape fits the value.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, core_schema

from jaxdist.config.describe import (
    TAG,
    arms,
    child_type,
    choices,
    describe_type,
    fields,
    is_mapping,
    is_model,
    is_sequence,
    split_annotation,
    tags,
)
from jaxdist.config.document import Key, KeyPath, keys_of
from jaxdist.errors import closest, did_you_mean
from jaxdist.types import Annotation, Json

_MESSAGE_IS_OURS = ("value_error", "assertion_error")
_KNOWN_TYPES = frozenset(get_args(core_schema.ErrorType)) - set(_MESSAGE_IS_OURS)
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Problem:
    """A problem at a path of the values.

    The message says what is allowed, without the path and the value, which are added later.
    """

    path: KeyPath
    message: str
    unknown: bool = False
    """Whether the problem is that the schema does not have this key."""


def explain_problems(schema: Annotation, values: Json, path: KeyPath = ()) -> list[Problem]:
    """Return every problem of `values` under `schema`, or [] if the values are valid.

    Args:
      schema: a model class or any annotation that pydantic accepts.
      values: the plain values, as from JSON.
      path: the path of `values` in the config, with which the paths of the problems begin.
    """
    found: dict[tuple[KeyPath, str], Problem] = {}
    unions: set[KeyPath] = set()
    for detail in _failures(schema, values):
        for problem in _explain(schema, values, path, detail, unions):
            found.setdefault((problem.path, problem.message), problem)
    return list(found.values())


def _failures(schema: Annotation, values: Json) -> list[ErrorDetails]:
    # The values are validated as JSON, since pydantic's strict mode for JSON accepts the forms of
    # YAML: text for a path, and a list for a tuple.
    text = json.dumps(values)
    try:
        adapter = TypeAdapter(schema, config=_STRICT)
    except PydanticUserError:
        # pydantic refuses the argument `config` for a schema with its own pydantic configuration.
        adapter = TypeAdapter(schema)
    try:
        adapter.validate_json(text)
    except ValidationError as error:
        found = error.errors(include_url=False)
        return [detail for detail in found if not _follows(detail, found)]
    return []


def _follows(detail: ErrorDetails, found: Sequence[ErrorDetails]) -> bool:
    """Return whether an error only follows from another error.

    There are two such errors. A list may be too short only because its invalid items were left out.
    And all values below an unknown key are invalid.
    """
    place = detail["loc"]
    if detail["type"] == "too_short":
        return any(_is_within(other["loc"], place) for other in found if other is not detail)
    unknown = [other["loc"][:-1] for other in found if other["loc"][-1:] == ("[key]",)]
    return place[-1:] != ("[key]",) and any(_is_within(place, key) for key in unknown)


def _is_within(place: Sequence[Key], outer: Sequence[Key]) -> bool:
    return place[: len(outer)] == outer


def _explain(
    schema: Annotation, value: Json, path: KeyPath, detail: ErrorDetails, unions: set[KeyPath]
) -> list[Problem]:
    keys = list(detail["loc"])
    while keys and len(arms(schema)) == 1 and (child := child_type(schema, keys[0])) is not None:
        if is_mapping(split_annotation(schema)[0]) and keys[1:] == ["[key]"]:
            return [_unknown_key(split_annotation(schema)[0], path, keys[0])]
        schema = child
        value = value[keys[0]] if keys[0] in keys_of(value) else None
        path = (*path, keys.pop(0))
    kind = detail["type"]
    if kind == "missing" and not keys:
        return [Problem(path, f"required, but not set; expected {describe_type(schema)}")]
    if kind not in _KNOWN_TYPES and (not keys or len(arms(schema)) == 1):
        return [Problem(path, _own_message(detail))]
    if len(arms(schema)) > 1:
        if path in unions:  # One explanation covers the errors of all alternatives.
            return []
        unions.add(path)
        return _explain_union(schema, value, path)
    if kind == "extra_forbidden" and len(keys) == 1:
        return [_unknown_key(split_annotation(schema)[0], path, keys[0])]
    return [Problem(path, _expected(schema, value))]


def _explain_union(schema: Annotation, value: Json, path: KeyPath) -> list[Problem]:
    tagged = tags(schema)
    if isinstance(value, dict) and len(tagged) > 1:
        if TAG not in value:
            words = f"required, but not set; expected one of: {', '.join(map(str, tagged))}"
            return [Problem((*path, TAG), words)]
        model = next((tagged[tag] for tag in tagged if tag == value[TAG]), None)
        if model is None:
            return [Problem((*path, TAG), did_you_mean(str(value[TAG]), map(str, tagged)))]
        return explain_problems(model, value, path) or [Problem(path, _expected(schema, value))]
    attempts = [
        (arm, explain_problems(arm, value, path)) for arm in arms(schema) if _fits(arm, value)
    ]
    otherwise = [Problem(path, _expected(schema, value))]
    if isinstance(value, dict | list):
        # The alternative with the fewest problems is probably the intended alternative.
        return min((found for _, found in attempts if found), key=len, default=otherwise)
    from_validators = (
        found[:1] for arm, found in attempts if found and found[0].message != _expected(arm, value)
    )
    return next(from_validators, otherwise)


def _fits(arm: Annotation, value: Json) -> bool:
    bare, _ = split_annotation(arm)
    shapes = is_mapping(bare), is_sequence(bare)
    return shapes == (isinstance(value, dict), isinstance(value, list))


def _own_message(detail: ErrorDetails) -> str:
    error = detail.get("ctx", {}).get("error")
    return str(error) if error is not None else detail["msg"]


def _unknown_key(schema: Annotation, path: KeyPath, key: Key) -> Problem:
    allowed = list(fields(schema)) if is_model(schema) else choices(get_args(schema)[0])
    if not allowed:
        what = (
            "this mapping must have no keys"
            if is_model(schema)
            else describe_type(get_args(schema)[0])
        )
        return Problem((*path, key), f"unknown key; {what}", unknown=True)
    hint = did_you_mean(str(key), map(str, allowed))
    return Problem((*path, key), f"unknown key; {hint}", unknown=True)


def _expected(schema: Annotation, value: Json) -> str:
    listed = [choice for choice in choices(schema) if isinstance(choice, str)]
    if isinstance(value, str) and listed and len(arms(schema)) == 1:
        return did_you_mean(value, listed)
    match = closest(value, listed) if isinstance(value, str) else None
    hint = f"; did you mean {match!r}?" if match else ""
    return f"expected {describe_type(schema)}{hint}"
