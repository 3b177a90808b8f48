"""Parts of a state by patterns over the paths of its arrays, such as `params` or `!opt_state`.

A pattern is a path whose names may have `*` and `?`; it selects all arrays below that path. A
pattern with a leading `!` excludes the arrays below its path. A part consists of the arrays that at
least one pattern selects and no pattern excludes; if all patterns exclude, the part consists of all
other arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import AfterValidator, Field

from jaxdist.checkpoint.manifest import LeafRecord
from jaxdist.checkpoint.structure import structure_differences
from jaxdist.config.schema import Config
from jaxdist.errors import CheckpointError
from jaxdist.types import PyTree

_LISTED = 12


def _path(pattern: str) -> str:
    names = pattern.removeprefix("!").split("/")
    if not all(names) or any(name.strip() != name for name in names):
        raise ValueError(
            f"{pattern!r} is not a path: write names joined by '/', such as params/encoder or "
            "!opt_state"
        )
    return pattern


Pattern = Annotated[str, AfterValidator(_path)]
"""A checked pattern over the paths of arrays."""
Patterns = Annotated[tuple[Pattern, ...], Field(min_length=1)]


class BeginWith(Config):
    """Begin a new run at step 0 with a part of another run's state."""

    run: Annotated[str, Field(min_length=1)]
    """Directory of the other run, such as runs/pretrained, or a model that `jaxdist import` can
    read; of a model each process reads only the parts that its devices hold."""
    parts: Patterns = ("params",)
    """Patterns of the paths to load, such as params/encoder; `*` matches any name, and a leading
    `!` excludes a path."""
    step: Annotated[int, Field(ge=0)] | None = None
    """Step of the checkpoint to load; null is the newest complete checkpoint."""


def matches(pattern: str, name: str) -> bool:
    """Return whether a path or one of its parents matches the pattern, whose `!` is ignored.

    >>> matches("params/*/kernel", "params/head/kernel"), matches("params", "params2/x")
    (True, False)
    """
    wanted, found = pattern.removeprefix("!").split("/"), name.split("/")
    return len(found) >= len(wanted) and all(map(fnmatchcase, found, wanted))


def taken(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the names that belong to the part of these patterns, in their order.

    >>> taken(["params", "!params/head"], ["params/body/w", "params/head/w", "step"])
    ['params/body/w']
    """
    without = [pattern for pattern in patterns if pattern.startswith("!")]
    among = [pattern for pattern in patterns if not pattern.startswith("!")]
    return [
        name
        for name in names
        if (not among or any(matches(pattern, name) for pattern in among))
        and not any(matches(pattern, name) for pattern in without)
    ]


def check_patterns(patterns: Sequence[str], names: Sequence[str], *, of: str) -> None:
    """Refuse a pattern that matches no name, and patterns that together select no name.

    Args:
      of: description of the state, which error messages name.

    Raises:
      CheckpointError: there are such patterns; the message lists them and the paths that exist.
    """
    unknown = [p for p in patterns if not any(matches(p, name) for name in names)]
    if unknown:
        raise CheckpointError(
            f"{', '.join(unknown)}: nothing in {of} has such a path; choose from {outline(names)}"
        )
    if not taken(patterns, names):
        raise CheckpointError(
            f"{', '.join(patterns)} together select nothing of {of}; choose from {outline(names)}"
        )


def outline(names: Sequence[str]) -> str:
    """Summarize paths by their first two names, with the number of arrays below each.

    >>> outline(["step", "params/a/w", "params/a/b", "params/c"])
    'step, params/a (2 arrays), params/c'
    """
    groups = Counter("/".join(name.split("/")[:2]) for name in names)
    listed = [f"{group} ({n} arrays)" if n > 1 else group for group, n in groups.items()]
    rest = len(listed) - _LISTED
    return ", ".join(listed[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def check_part(saved: Mapping[str, LeafRecord], target: PyTree, *, where: str) -> None:
    """Refuse a checkpoint that lacks arrays of a part, or whose arrays have other shapes or dtypes.

    Args:
      target: tree of `jax.ShapeDtypeStruct` with the arrays of the part only.

    Raises:
      CheckpointError: arrays do not fit; the message lists the first, with both shapes and dtypes.
    """
    lines = [
        line
        for line in structure_differences(dict(saved), target)
        if not line.endswith(", not wanted")
    ]
    if lines:
        rest = len(lines) - _LISTED
        listed = lines[:_LISTED] + ([f"and {rest} more"] if rest > 0 else [])
        raise CheckpointError(
            f"{where} lacks arrays that were asked for, or has them in other shapes:\n  "
            + "\n  ".join(listed)
            + f"\nit has {outline(list(saved))}; leave out what does not fit, as with "
            f"'!{lines[0].split(':')[0]}', or give the model the same shapes"
        )
