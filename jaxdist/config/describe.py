"""Descriptions of the values that a field accepts, and access to the parts of an annotation."""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, RootModel
from pydantic.fields import FieldInfo

from jaxdist.types import Annotation, Json

TAG = "type"

_WORDS: dict[Annotation, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    bytes: "text",
    Path: "a path",
    PurePath: "a path",
    type(None): "null",
    None: "null",
    Any: "any value",
    object: "any value",
}


def split_annotation(annotation: Annotation) -> tuple[Annotation, tuple[object, ...]]:
    """Return the type of an annotation and its metadata, without `Annotated` and type aliases.

    >>> split_annotation(Annotated[int, "a", "b"])
    (<class 'int'>, ('a', 'b'))
    """
    metadata: tuple[object, ...] = ()
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *extra = get_args(annotation)
            metadata = (*extra, *metadata)
        elif hasattr(annotation, "__value__"):
            annotation = annotation.__value__
        elif isinstance(annotation, type) and issubclass(annotation, RootModel):
            annotation = field_type(annotation.model_fields["root"])
        else:
            return annotation, metadata


def field_type(field: FieldInfo) -> Annotation:
    """Return a field's annotation, together with its metadata."""
    if field.metadata:
        return Annotated[(field.annotation, *field.metadata)]
    return field.annotation


def fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a model by their keys in YAML."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def is_model(bare: Annotation) -> bool:
    return isinstance(bare, type) and issubclass(bare, BaseModel)


def is_mapping(bare: Annotation) -> bool:
    origin = get_origin(bare) or bare
    return is_model(bare) or (isinstance(origin, type) and issubclass(origin, Mapping))


def is_sequence(bare: Annotation) -> bool:
    origin = get_origin(bare) or bare
    if not isinstance(origin, type) or issubclass(origin, str | bytes):
        return False
    return issubclass(origin, Sequence | set | frozenset)


def arms(annotation: Annotation) -> list[Annotation]:
    """Return the alternatives of a union, including the alternatives of nested unions.

    For an annotation that is not a union, return only the annotation.
    """
    bare, metadata = split_annotation(annotation)
    if get_origin(bare) in (Union, types.UnionType):
        return [arm for child in get_args(bare) for arm in arms(child)]
    return [Annotated[(bare, *metadata)] if metadata else bare]


def tags(annotation: Annotation) -> dict[Json, Annotation]:
    """Return the models of a tagged union by the value of `type:`, or {} for other annotations."""
    found: dict[Json, Annotation] = {}
    for arm in arms(annotation):
        model, _ = split_annotation(arm)
        if is_mapping(model):
            info = fields(model).get(TAG) if is_model(model) else None
            literal = split_annotation(info.annotation)[0] if info is not None else None
            if get_origin(literal) is not Literal:
                return {}
            found |= dict.fromkeys(get_args(literal), model)
    return found


def child_type(annotation: Annotation, key: Any) -> Annotation | None:
    """Return the annotation of the value under a key, or None if no value may be under the key."""
    bare, _ = split_annotation(annotation)
    if is_model(bare):
        info = fields(bare).get(key)
        return None if info is None else field_type(info)
    inner = get_args(bare)
    if is_mapping(bare):
        return inner[1] if len(inner) == 2 else Any
    if is_sequence(bare) and isinstance(key, int):
        if get_origin(bare) is tuple and Ellipsis not in inner:
            return inner[key] if key < len(inner) else None
        return inner[0] if inner else Any
    return None


def choices(annotation: Annotation) -> list[Annotation]:
    """Return the literal values of an annotation, including the values in its unions and enums."""
    found: list[Json] = []
    for arm in arms(annotation):
        bare, _ = split_annotation(arm)
        if get_origin(bare) is Literal:
            found += get_args(bare)
        elif isinstance(bare, type) and issubclass(bare, enum.Enum):
            found += [member.value for member in bare]
    return found


def describe_type(annotation: Annotation) -> str:
    """Return a description of the values that an annotation accepts.

    >>> describe_type(Annotated[int, annotated_types.Ge(1)] | None)
    'a whole number of at least 1, or null'
    >>> describe_type(Literal["gelu", "relu"] | bool)
    "'gelu', 'relu', or true or false"
    >>> describe_type(dict[str, list[float]])
    'a mapping (each value: a list (each item: a number))'
    """
    words: list[str] = []
    tagged = tags(annotation)
    if len(tagged) > 1:
        words.append(f"a mapping with `{TAG}:` one of {_listed(list(tagged))}")
    alternatives = arms(annotation)
    shared = split_annotation(annotation)[1] if len(alternatives) > 1 else ()
    for arm in alternatives:
        if not (len(tagged) > 1 and is_model(split_annotation(arm)[0])):
            words.append(_describe_one(arm, shared))
    unique = list(dict.fromkeys(words))
    return unique[0] if len(unique) == 1 else f"{', '.join(unique[:-1])}, or {unique[-1]}"


def _listed(values: list[Json]) -> str:
    return ", ".join(repr(value) for value in values)


def _describe_one(annotation: Annotation, shared: tuple[object, ...]) -> str:
    bare, metadata = split_annotation(annotation)
    listed = choices(bare)
    if listed or bare is type(None):
        return _listed(listed) or "null"
    bounds = _bounds((*metadata, *shared), counted=is_sequence(bare) or is_mapping(bare))
    if is_mapping(bare):
        inner = get_args(bare)
        text = f" (each value: {describe_type(inner[1])})" if len(inner) == 2 else ""
        return f"a mapping{bounds}{text}"
    if is_sequence(bare):
        inner = [arg for arg in get_args(bare) if arg is not Ellipsis]
        if get_origin(bare) is tuple and Ellipsis not in get_args(bare):
            return f"a list of {len(inner)} ({'; '.join(describe_type(arg) for arg in inner)})"
        text = f" (each item: {describe_type(inner[0])})" if inner else ""
        return f"a list{bounds}{text}"
    try:
        word = _WORDS.get(bare)
    except TypeError:
        # An annotation that cannot be hashed cannot be a key of `_WORDS`.
        word = None
    return f"{word or getattr(bare, '__name__', None) or typing.cast('str', str(bare))}{bounds}"


def _bounds(metadata: tuple[object, ...], *, counted: bool) -> str:
    """Return a description of the bounds in an annotation's metadata.

    Args:
      counted: whether the bounds are on the number of entries, not on the value.
    """
    found: list[str] = []
    for item in _flat(metadata):
        for name, words in (
            ("ge", "of at least {}"),
            ("gt", "greater than {}"),
            ("le", "of at most {}"),
            ("lt", "below {}"),
            ("multiple_of", "that is a multiple of {}"),
            ("min_length", "with {} or more entries" if counted else "of {} characters or more"),
            ("max_length", "with at most {} entries" if counted else "of at most {} characters"),
            ("pattern", "that matches {!r}"),
        ):
            bound = getattr(item, name, None)
            if bound is not None:
                found.append(words.format(getattr(bound, "pattern", bound)))
    return f" {' and '.join(found)}" if found else ""


def _flat(metadata: tuple[object, ...]) -> list[Json]:
    found: list[Json] = []
    for item in metadata:
        if isinstance(item, FieldInfo):
            found += _flat(tuple(item.metadata))
        elif isinstance(item, annotated_types.GroupedMetadata):
            found += _flat(tuple(item))
        else:
            found.append(item)
    return found
