"""Variants of a config, each of which is a name with overrides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxdist.config.show import value_text
from jaxdist.errors import ConfigError
from jaxdist.types import Json

LONGEST_NAME = 20
"""Largest number of characters of a name, so that the table is at most 80 characters wide."""
_OPENING, _CLOSING = "{[", "}]"


@dataclass(frozen=True)
class Variant:
    """A name, and the settings in which a variant differs from the config.

    Attributes:
      name: name of the variant's row in the table.
      overrides: `section.key=value`, as on the command line.
    """

    name: str
    overrides: tuple[str, ...] = ()


def overrides_of(settings: Mapping[str, Json]) -> tuple[str, ...]:
    """Return settings by dotted key as command-line overrides.

    >>> overrides_of({"optim.b1": 0, "optim.type": "sgd", "mesh": {"data": 2}})
    ('optim.b1=0', 'optim.type=sgd', 'mesh={"data": 2}')
    """
    return tuple(f"{key}={value_text(value)}" for key, value in settings.items())


AS_GIVEN = Variant("as given")
"""The config without overrides."""


def parse_variants(texts: Sequence[str], *, taken: Sequence[str]) -> tuple[Variant, ...]:
    """Parse variants from the command line, each `NAME=key=value key2=value2`.

    Args:
      taken: names that are already in use.

    Raises:
      ConfigError: there is no name or no setting, or the name is too long or in use.

    >>> parse_variants(["half=optim.learning_rate=1e-3 optim.schedule={type: linear}"], taken=[])
    (Variant(name='half', overrides=('optim.learning_rate=1e-3', 'optim.schedule={type: linear}')),)
    """
    found: list[tuple[str, tuple[str, ...]]] = []
    for text in texts:
        name, _, settings = (part.strip() for part in text.partition("="))
        overrides = split_overrides(settings)
        if not name or not overrides or not all("=" in override for override in overrides):
            raise ConfigError(
                f"--variant {text!r} lacks a name or settings: write NAME='section.key=value "
                "section.key=value'"
            )
        found.append((name, overrides))
    return named_variants(found, taken=taken)


def named_variants(
    pairs: Iterable[tuple[str, tuple[str, ...]]], *, taken: Sequence[str], what: str = "--variant"
) -> tuple[Variant, ...]:
    """Create variants from names and overrides.

    Args:
      what: source of the variants, for error messages.

    Raises:
      ConfigError: a name is too long or in use.
    """
    found: list[Variant] = []
    for name, overrides in pairs:
        if len(name) > LONGEST_NAME or not name.isprintable() or "|" in name:
            raise ConfigError(
                f"{what} {name!r} ({len(name)} characters) does not fit a table: at most "
                f"{LONGEST_NAME} printable characters without '|'"
            )
        if name in [*taken, *(variant.name for variant in found)]:
            raise ConfigError(
                f"{what} {name!r} is the name of another variant: choose a name that is free"
            )
        found.append(Variant(name, overrides))
    return tuple(found)


def split_overrides(text: str) -> tuple[str, ...]:
    """Split settings at spaces, except inside brackets and before a word without `=`.

    >>> split_overrides("a.b={c: 1, d: x=2} e=two words")
    ('a.b={c: 1, d: x=2}', 'e=two words')
    """
    found: list[str] = []
    depth = 0
    for piece in re.split(r"(\s+)", text.strip()):
        begins = depth == 0 and re.match(r"[\w.\-]+=", piece) is not None
        if begins or not found:
            found.append(piece)
        else:
            found[-1] += piece
        depth += sum(piece.count(c) for c in _OPENING) - sum(piece.count(c) for c in _CLOSING)
    return tuple(override.strip() for override in found if override.strip())
