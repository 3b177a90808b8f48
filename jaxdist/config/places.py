"""Where in a schema a key belongs that was written in another section."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace

from jaxdist.config.describe import TAG, arms, field_type, fields, is_model, split, tags
from jaxdist.config.document import KeyPath, dotted
from jaxdist.config.explain import Problem
from jaxdist.types import Annotation, Json

NEAR = 0.8
"""How like each other two keys are at least, from 0 to 1, for one to be taken for the other."""
MOST = 3


def with_place(problem: Problem, schema: Annotation, values: Json) -> Problem:
    """The problem, with the settings of other sections that an unknown key may have been meant for.

    Args:
      schema: of the whole tree, of which `values` are; the alternatives that they name count.
    """
    if not problem.unknown or "did you mean" in problem.message:
        return problem
    found = _places(problem.path, schema, values)
    if not found:
        return problem
    hint = " or ".join(repr(dotted(path)) for path in found)
    rest = problem.message.removeprefix("unknown key; ")
    return replace(problem, message=f"unknown key; did you mean {hint}? ({rest})")


def _places(path: KeyPath, schema: Annotation, values: Json) -> list[KeyPath]:
    """The settings whose last key is most like that of `path`, those of its own section first."""
    scores: dict[KeyPath, tuple[float, int]] = {}
    for other in _settings(schema, values, ()):
        likeness = difflib.SequenceMatcher(None, str(path[-1]), str(other[-1])).ratio()
        shared = sum(1 for one, two in zip(path[:-1], other[:-1], strict=False) if one == two)
        if likeness >= NEAR and other != path:
            scores[other] = (likeness, shared)
    best = max(scores.values(), default=None)
    return [other for other, score in scores.items() if score == best][:MOST]


def _settings(schema: Annotation, value: Json, path: KeyPath) -> Iterator[KeyPath]:
    """The paths of all settings, through the alternatives that the values choose."""
    chosen = value.get(TAG) if isinstance(value, dict) else None
    tagged = tags(schema)
    for arm in arms(schema):
        model, _ = split(arm)
        if not is_model(model) or (
            isinstance(chosen, str) and tagged.get(chosen, model) is not model
        ):
            continue
        for key, info in fields(model).items():
            yield (*path, key)
            below = value.get(key) if isinstance(value, dict) else None
            if below is None and hasattr(info.default, TAG):
                below = {TAG: getattr(info.default, TAG)}
            yield from _settings(field_type(info), below, (*path, key))
