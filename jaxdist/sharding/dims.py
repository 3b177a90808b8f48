"""The dims of each parameter, from the model and from the patterns of a config, strictly."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxdist.errors import ShardingError, closest, did_you_mean
from jaxdist.sharding.layout import ELLIPSIS, Layout, ShardingConfig
from jaxdist.trees import pattern_of
from jaxdist.types import Dims, PyTree

STACKED = "layers"
"""The first dim of stacked layers."""

MOST_NAMES = 4
"""Of parameters in a message where none is near to what was meant."""

ACTIVATION_DIMS = frozenset({"batch", "seq", "residual_seq"})
"""Dims that no parameter has.

Between layers the sequence is `residual_seq`, inside them `seq`: `residual_seq: tensor` is sequence
parallelism (Korthikanti et al. 2022, arXiv 2205.05198), norms and residuals split as well.
"""


def resolve_dims(
    config: ShardingConfig,
    shapes: Mapping[str, tuple[int, ...]],
    dims: Mapping[str, Dims | None],
    stacked: frozenset[str] = frozenset(),
    layout: Layout | None = None,
) -> dict[str, Dims]:
    """Every parameter's dims: the model's own, else those of the config's first fitting pattern.

    A parameter with neither is whole where no axis of the mesh splits parameters.

    Args:
      shapes: of each parameter, by name.
      dims: what the model names of each; None is nothing.
      stacked: names of the parameters whose first dim counts layers; dims of one layer do for them.
      layout: that the parameters will lie on; None is one whose axes split parameters.

    Raises:
      ShardingError: parameters without dims, patterns that do nothing, rules for dims that no
        parameter has: all of them in one message.
    """
    resolved: dict[str, Dims] = {}
    unnamed: dict[str, tuple[int, ...]] = {}
    otherwise = None if layout is None or _splits_parameters(layout) else "whole"
    for name, shape in shapes.items():
        pattern = _first(name, config.params) or otherwise
        found = _given(dims[name], pattern, shape, name in stacked)
        if found is None:
            unnamed[name] = shape
        else:
            resolved[name] = found
    problems = _idle_patterns(config.params, dims)
    known = {d for found in resolved.values() for d in found if d} | ACTIVATION_DIMS
    problems += [
        f"sharding.rules.{dim}: no parameter has this dim, so the rule does nothing: "
        f"{did_you_mean(dim, sorted(known))}"
        for dim in config.rules
        if dim not in known and not unnamed
    ]
    if unnamed:
        problems.append(_unnamed(unnamed, stacked))
    if problems:
        raise ShardingError("\n".join(problems))
    return resolved


def _splits_parameters(layout: Layout) -> bool:
    """Return whether an axis larger than 1, other than stages, splits dims of parameters."""
    dims = {dim for dim, _ in layout.rules} - ACTIVATION_DIMS - {STACKED}
    return any(layout.parts(dim) > 1 for dim in dims)


def _first(name: str, params: Mapping[str, Any]) -> PyTree:
    matches = (dims for pattern, dims in params.items() if fnmatch.fnmatchcase(name, pattern))
    return next(matches, None)


def _given(own: Dims | None, pattern: Any, shape: tuple[int, ...], stacked: bool) -> Dims | None:
    """A parameter's dims from what the model and a pattern name; None where neither does."""
    if own is not None:
        return (STACKED, *own) if stacked and len(own) == len(shape) - 1 else own
    if pattern is None:
        return () if shape == () else None
    given = [ELLIPSIS] if pattern == "whole" else list(pattern)
    if stacked and given[:1] != [STACKED]:
        given = [STACKED, *given]
    if ELLIPSIS not in given:
        return tuple(given)
    at = given.index(ELLIPSIS)
    return (*given[:at], *(None,) * (len(shape) - len(given) + 1), *given[at + 1 :])


def _idle_patterns(params: Mapping[str, Any], dims: Mapping[str, Dims | None]) -> list[str]:
    """What is wrong with the patterns that give no parameter its dims."""
    matched = {
        pattern: {name for name in dims if fnmatch.fnmatchcase(name, pattern)} for pattern in params
    }
    free = {name for name, own in dims.items() if own is None}
    problems, before = [], []
    for pattern, names in matched.items():
        hides = next((p for p in before if names & free < matched[p] & free), None)
        if not names:
            why = f"matches no parameter: {_near(pattern, dims)}"
        elif not names & free:
            name = min(names)
            why = (
                f"matches only parameters that name their own dims ({name}: {_shown(dims[name])}); "
                "take it away, and map these dims by sharding.rules"
            )
        elif hides is not None:
            why = (
                f"comes after {hides!r}, which takes all that it matches; put {pattern!r} before it"
            )
        else:
            why = ""
        if why:
            problems.append(f"sharding.params: pattern {pattern!r} {why}")
        before.append(pattern)
    return problems


def _near(pattern: str, names: Iterable[str]) -> str:
    """The parameter that a pattern may mean, or what some are called."""
    known = [*dict.fromkeys(map(pattern_of, names))]
    more, match = len(known) - MOST_NAMES, closest(pattern, known)
    if more <= 0:
        return did_you_mean(pattern, known)
    if match:
        return f"did you mean {match!r}?"
    return f"the model has {', '.join(known[:MOST_NAMES])} and {more} more"


def _unnamed(shapes: Mapping[str, tuple[int, ...]], stacked: frozenset[str]) -> str:
    """What to tell of parameters without dims: one line for those alike, as YAML to paste."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name, shape in shapes.items():
        groups.setdefault((pattern_of(name), len(shape)), []).append(name)
    lines: dict[str, str] = {}
    for (pattern, rank), names in sorted(groups.items(), key=lambda group: -len(group[1])):
        # Of one pattern for several ranks the most frequent keeps it; the others stand before it.
        for key, members in _keys(pattern, names, taken=pattern in lines).items():
            free = ["null"] * rank
            if names[0] in stacked:
                free[0] = STACKED
            found = [*dict.fromkeys(_shown(shapes[name]) for name in members)]
            sizes = found[0] if len(found) == 1 else f"{found[0]} and other sizes"
            count = "" if len(members) == 1 else f", {len(members)} parameters"
            lines[key] = f'    "{key}": [{", ".join(free)}]  # {sizes}{count}'
    # A `*` reaches over `/`, so that the longer come first, and names before patterns.
    ordered = sorted(lines, key=lambda key: (-key.count("/"), key.count("*")))
    many = "1 parameter names" if len(shapes) == 1 else f"{len(shapes)} parameters name"
    return "\n".join(
        [
            f"{many} no dims, and no pattern of sharding.params matches, on a mesh that splits "
            "parameters: name each dim (embed, mlp, ...; null is never split), or leave all "
            'whole by "*": whole:',
            "sharding:",
            "  params:",
            *(lines[key] for key in ordered),
        ]
    )


def _keys(pattern: str, names: Sequence[str], *, taken: bool) -> dict[str, list[str]]:
    """Patterns for these names, with the names that each stands for."""
    if taken or len(names) == 1:
        return {glob.escape(name): [name] for name in names}
    return {pattern: [*names]}


def _shown(values: Sequence[Any] | None) -> str:
    return f"[{', '.join('null' if value is None else str(value) for value in values or ())}]"
