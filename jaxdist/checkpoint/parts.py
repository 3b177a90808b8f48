"""Parts of a state, which are described by patterns over the paths of arrays, such as `!opt_state`.

A pattern is a path whose names may contain `*` and `?`; the pattern selects all arrays at and below
that path. A pattern with a leading `!` excludes the arrays at and below its path. A part consists
of the arrays that at least one pattern selects and no pattern excludes. If all patterns exclude,
the part consists of all arrays that no pattern excludes.
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
from jaxdist.errors import LINES, CheckpointError, some_of
from jaxdist.types import PyTree

_LISTED = 12


def _path(pattern: str) -> str:
    names = pattern.removeprefix("!").split("/")
    if not all(names) or any(name.strip() != name for name in names):
        raise ValueError(
            f"{pattern!r} is not a path of arrays: write names joined by '/', such as "
            "params/encoder or !opt_state"
        )
    return pattern


Pattern = Annotated[str, AfterValidator(_path)]
"""A pattern over the paths of arrays. Validation checks that it has the form of a pattern."""
Patterns = Annotated[tuple[Pattern, ...], Field(min_length=1)]


class BeginWith(Config):
    """The part of another run's state with which a new run begins at step 0."""

    run: Annotated[str, Field(min_length=1)]
    """The directory of the other run, such as runs/pretrained, or a model that `jaxdist import` can
    read. Each process reads only the shards of a model that its devices hold.
    """
    parts: Patterns = ("params",)
    """The patterns of the paths to load, such as params/encoder; `*` matches any name, and a
    leading `!` excludes a path."""
    step: Annotated[int, Field(ge=0)] | None = None
    """The step of the checkpoint to load; null loads the newest complete checkpoint."""


def matches(pattern: str, name: str) -> bool:
    """Return whether a path or one of its parents matches the pattern; a leading `!` is ignored.

    >>> matches("params/*/kernel", "params/head/kernel"), matches("params", "params2/x")
    (True, False)
    """
    wanted, found = pattern.removeprefix("!").split("/"), name.split("/")
    return len(found) >= len(wanted) and all(map(fnmatchcase, found, wanted))


def taken(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return, in order, the names that belong to the part that the patterns describe.

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
    """Check that each pattern matches a name, and that the patterns together select a name.

    Args:
      of: the description of the state in error messages.

    Raises:
      CheckpointError: a pattern matches no name, or the patterns together select no name. The
        message lists the patterns and the paths that exist.
    """
    unknown = [p for p in patterns if not any(matches(p, name) for name in names)]
    if unknown:
        raise CheckpointError(
            f"{', '.join(unknown)}: {of} has no array with such a path; choose from "
            f"{outline(names)}"
        )
    if not taken(patterns, names):
        raise CheckpointError(
            f"{', '.join(patterns)} together select no array of {of}; choose from {outline(names)}"
        )


def outline(names: Sequence[str]) -> str:
    """Return a summary of paths: the first two names of each path, and the number of arrays below.

    >>> outline(["step", "params/a/w", "params/a/b", "params/c"])
    'step, params/a (2 arrays), params/c'
    """
    groups = Counter("/".join(name.split("/")[:2]) for name in names)
    listed = [f"{group} ({n} arrays)" if n > 1 else group for group, n in groups.items()]
    return some_of(listed, _LISTED)


def check_part(saved: Mapping[str, LeafRecord], target: PyTree, *, where: str) -> None:
    """Check that a checkpoint has all arrays of a part, with the same shapes and dtypes.

    Args:
      target: a tree of `jax.ShapeDtypeStruct` with only the arrays of the part.
      where: the name of the checkpoint in the message.

    Raises:
      CheckpointError: arrays are missing or do not fit. The message lists the first of these
        arrays, with the saved and the wanted shapes and dtypes.
    """
    lines = [
        line
        for line in structure_differences(dict(saved), target)
        if not line.endswith(", not expected")
    ]
    if lines:
        raise CheckpointError(
            f"{where} lacks arrays of the requested parts, or has these arrays with "
            f"different shapes:\n  {some_of(lines, _LISTED, LINES)}\n"
            f"the checkpoint has {outline(list(saved))}; leave out the arrays that do not fit, "
            f"for example with '!{lines[0].split(':')[0]}', or change the model so that its arrays "
            "have the shapes of the checkpoint"
        )
