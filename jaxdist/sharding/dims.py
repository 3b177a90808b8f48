"""The choice of the dims of each parameter, from the model and from the patterns of a config."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jaxdist.errors import ConfigError, ShardingError, closest, did_you_mean
from jaxdist.sharding.layout import ELLIPSIS, Layout, ShardingConfig
from jaxdist.trees import pattern_of
from jaxdist.types import Dims

STACKED = "layers"
"""The name of the first dim of the parameters of stacked layers."""

MOST_NAMES = 4
"""The number of parameter names that a message lists if no name is similar to a given pattern."""

ACTIVATION_DIMS = frozenset({"batch", "seq", "residual_seq"})
"""The dims that only activations have.

The sequence dim is named `residual_seq` between layers and `seq` inside layers. The rule
`residual_seq: tensor` is sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198), in which
norms and residuals are split too.
"""


def resolve_dims(
    config: ShardingConfig,
    shapes: Mapping[str, tuple[int, ...]],
    dims: Mapping[str, Dims | None],
    stacked: frozenset[str] = frozenset(),
    layout: Layout | None = None,
) -> dict[str, Dims]:
    """Return the dims of each parameter.

    If the model names the dims of a parameter, these are returned. Otherwise the dims are from the
    first pattern of the config that matches the parameter's name. If no pattern matches and the
    mesh splits no parameters, all dims are None.

    Args:
      config: the config of the sharding.
      shapes: the shape of each parameter, by name.
      dims: the dims of each parameter by name, from the model, or None if the model does not name
        them.
      stacked: the names of the parameters whose first dim counts layers. The model or a pattern may
        name the dims of a single layer only.
      layout: the layout of the parameters, or None to assume that the mesh splits parameters.

    Raises:
      ShardingError: parameters have no dims, patterns have no effect, or rules name dims that no
        parameter has. A single message lists all of these faults.
    """
    resolved: dict[str, Dims] = {}
    unnamed: dict[str, tuple[int, ...]] = {}
    otherwise = None if layout is None or _splits_parameters(layout) else "whole"
    for name, shape in shapes.items():
        named = (d for p, d in config.params.items() if fnmatch.fnmatchcase(name, p))
        pattern = next(named, otherwise)
        found = _given(dims[name], pattern, shape, name in stacked)
        if found is None:
            unnamed[name] = shape
        else:
            resolved[name] = found
    problems = _idle_patterns(config.params, dims)
    known = {d for found in resolved.values() for d in found if d} | ACTIVATION_DIMS
    problems += [
        (
            f"sharding.rules.{dim}: no parameter has this dim, so the rule has no effect: "
            f"{did_you_mean(dim, sorted(known))}"
        )
        for dim in config.rules
        if dim not in known and not unnamed
    ]
    if unnamed:
        problems.append(_unnamed(unnamed, stacked))
    if problems:
        raise ShardingError("\n".join(problems))
    return resolved


def _splits_parameters(layout: Layout) -> bool:
    """Return whether the mesh splits a dim of parameters, apart from the dim of stacked layers."""
    dims = {dim for dim, _ in layout.rules} - ACTIVATION_DIMS - {STACKED}
    return any(layout.parts(dim) > 1 for dim in dims)


def _given(own: Dims | None, pattern: Any, shape: tuple[int, ...], stacked: bool) -> Dims | None:
    """Return the dims of a parameter, or None if neither the model nor a pattern names them.

    Args:
      own: the dims that the model names, or None if the model names none.
      pattern: the dims from the config, or None if no pattern matches.
      shape: the shape of the parameter.
      stacked: whether the first dim of the parameter counts layers.
    """
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
    """Return a sentence for each pattern that has no effect, with the reason.

    A pattern has no effect if no parameter gets its dims from the pattern.
    """
    matched = {
        pattern: {name for name in dims if fnmatch.fnmatchcase(name, pattern)} for pattern in params
    }
    free = {name for name, own in dims.items() if own is None}
    problems, before = [], []
    for pattern, names in matched.items():
        # The first pattern that matches is used. If an earlier pattern matches all parameters that
        # `pattern` matches, and more, `pattern` has no effect.
        hides = next((p for p in before if names & free < matched[p] & free), None)
        if not names:
            why = f"matches no parameter: {near_names(pattern, dims)}"
        elif not names & free:
            name = min(names)
            why = (
                f"matches only parameters whose dims the model names ({name}: "
                f"{_shown(dims[name])}); remove the pattern, and map these dims with sharding.rules"
            )
        elif hides is not None:
            why = (
                f"has no effect: {hides!r} before it matches the same parameters; put "
                f"{pattern!r} first"
            )
        else:
            why = ""
        if why:
            problems.append(f"sharding.params: pattern {pattern!r} {why}")
        before.append(pattern)
    return problems


def near_names(pattern: str, names: Iterable[str]) -> str:
    """Return a hint for a pattern that matches no parameter.

    The hint is the most similar name of a parameter, or a list of the names of some parameters.
    """
    known = [*dict.fromkeys(map(pattern_of, names))]
    more, match = len(known) - MOST_NAMES, closest(pattern, known)
    if more <= 0:
        return did_you_mean(pattern, known)
    if match:
        return f"did you mean {match!r}?"
    return f"the model has {', '.join(known[:MOST_NAMES])} and {more} more"


def _unnamed(shapes: Mapping[str, tuple[int, ...]], stacked: frozenset[str]) -> str:
    """Return an error message about parameters without dims, with YAML that a user can paste.

    The YAML has a line for each pattern of names and number of dims.
    """
    groups: dict[tuple[str, int], list[str]] = {}
    for name, shape in shapes.items():
        groups.setdefault((pattern_of(name), len(shape)), []).append(name)
    lines: dict[str, str] = {}
    for (pattern, rank), names in sorted(groups.items(), key=lambda group: -len(group[1])):
        # If parameters with different numbers of dims match a pattern, the YAML uses the pattern
        # for the most frequent number of dims. Parameters with another number are listed by their
        # names, before the pattern.
        apart = pattern in lines or len(names) == 1
        keys = {glob.escape(name): [name] for name in names} if apart else {pattern: names}
        for key, members in keys.items():
            free = ["null"] * rank
            if names[0] in stacked:
                free[0] = STACKED
            found = [*dict.fromkeys(_shown(shapes[name]) for name in members)]
            sizes = found[0] if len(found) == 1 else f"{found[0]} and other sizes"
            count = "" if len(members) == 1 else f", {len(members)} parameters"
            lines[key] = f'    "{key}": [{", ".join(free)}]  # {sizes}{count}'
    # A `*` also matches `/`, so longer patterns must come first, and names before patterns.
    ordered = sorted(lines, key=lambda key: (-key.count("/"), key.count("*")))
    many = "1 parameter names" if len(shapes) == 1 else f"{len(shapes)} parameters name"
    return "\n".join(
        [
            f"{many} no dims, and no pattern of sharding.params matches, on a mesh that splits "
            "parameters: name each dim (embed, mlp, ...; null is never split), or keep all "
            'whole with "*": whole:',
            "sharding:",
            "  params:",
            *(lines[key] for key in ordered),
        ]
    )


def _shown(values: Sequence[Any] | None) -> str:
    return f"[{', '.join('null' if value is None else str(value) for value in values or ())}]"


def matching_names(
    patterns: Sequence[str], names: Collection[str], *setting: str
) -> frozenset[str]:
    """Return the names that at least one pattern matches.

    Args:
      setting: the path of the setting with the patterns, for errors.

    Raises:
      ConfigError: a pattern matches no name; the message lists each such pattern, with similar
        names.
    """
    idle = [p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for name in names)]
    if idle:
        lines = [f"{p!r} matches no parameter: {near_names(p, names)}" for p in idle]
        raise ConfigError("\n".join(lines), setting=setting)
    return frozenset(n for n in names if any(fnmatch.fnmatchcase(n, p) for p in patterns))


def resting_names(
    patterns: Sequence[str], names: Collection[str], padded: Mapping[str, tuple[int, int]]
) -> frozenset[str]:
    """Return the names of the parameters that rest in the host's memory.

    Args:
      patterns: the patterns of `parallel.zero.offload_parameters`.
      names: the names of all parameters.
      padded: for each parameter that is stored with padding, the length of the dim without padding
        and with padding.

    Raises:
      ConfigError: a pattern matches no parameter, or a parameter that is stored with padding.
    """
    setting = "zero", "offload_parameters"
    found = matching_names(patterns, names, *setting)
    for name in sorted(found & padded.keys()):
        length, full = padded[name]
        raise ConfigError(
            f"stage 3 stores {name} with a dim of {length} padded to {full}, and padding cannot "
            "be removed in the host's memory: choose other parameters, or sizes that the devices "
            "divide",
            setting=setting,
        )
    return found
