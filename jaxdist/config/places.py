"""The search for the section to which a misplaced key belongs."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from jaxdist.config.describe import TAG, arms, field_type, fields, is_model, split_annotation, tags
from jaxdist.config.document import KeyPath, dotted
from jaxdist.config.explain import Problem
from jaxdist.types import Annotation, Json

NEAR = 0.8
"""The least similarity, from 0 to 1, at which a key is suggested in place of an unknown key."""
MOST = 3


def with_places(problems: Sequence[Problem], schema: Annotation, values: Json) -> Sequence[Problem]:
    """Return the problems, with suggestions from other sections for unknown keys.

    Args:
      schema: the schema of the complete tree `values`.
    """
    if not any(map(_is_lost, problems)):
        return problems
    by_key: dict[str, list[KeyPath]] = {}
    for path in _settings(schema, values, ()):
        by_key.setdefault(str(path[-1]), []).append(path)
    return [_with_place(one, by_key) if _is_lost(one) else one for one in problems]


def _is_lost(problem: Problem) -> bool:
    """Return whether a problem is an unknown key that resembles no key of the same section."""
    return problem.unknown and "did you mean" not in problem.message


def _with_place(problem: Problem, by_key: Mapping[str, Sequence[KeyPath]]) -> Problem:
    path = problem.path
    near = difflib.get_close_matches(str(path[-1]), by_key, n=MOST, cutoff=NEAR)
    # A setting that several alternatives of a section share has one path.
    others = list(dict.fromkeys(other for key in near for other in by_key[key] if other != path))
    if not others:
        return problem
    # Keys near the section of the problem come first, then keys of few levels, and the same word
    # comes last: `step` is taken for `train.steps`, and not for the `step` of a nested section that
    # few users know.
    best = min(_distance(path, other) for other in others)
    found = [other for other in others if _distance(path, other) == best][:MOST]
    hint = " or ".join(repr(dotted(path)) for path in found)
    rest = problem.message.removeprefix("unknown key; ")
    return replace(problem, message=f"unknown key; did you mean {hint}? ({rest})")


def _distance(path: KeyPath, other: KeyPath) -> tuple[int, int, bool]:
    # `zip` is not strict: only the levels that both paths have are compared.
    shared = sum(1 for one, two in zip(path[:-1], other[:-1], strict=False) if one == two)
    return -shared, len(other), path[-1] != other[-1]


def _settings(schema: Annotation, value: Json, path: KeyPath) -> Iterator[KeyPath]:
    """Yield the paths of all settings in a schema.

    A section with alternatives has the settings of the chosen type.
    """
    chosen = value.get(TAG) if isinstance(value, dict) else None
    tagged = tags(schema)
    for arm in arms(schema):
        model, _ = split_annotation(arm)
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
