"""Variants of a config; a variant is a name with overrides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxdist.config.show import value_text
from jaxdist.errors import ConfigError
from jaxdist.types import Json

LONGEST_NAME = 20
"""The largest number of characters of a name, so that tables are at most 80 characters wide."""
_OPENING, _CLOSING = "{[", "}]"


@dataclass(frozen=True)
class Variant:
    """A variant of a config.

    Attributes:
      name: the name of the variant's row in the table.
      overrides: the settings in which the variant differs from the config, as texts
        `section.key=value`.
    """

    name: str
    overrides: tuple[str, ...] = ()


def overrides_of(settings: Mapping[str, Json]) -> tuple[str, ...]:
    """Return settings as overrides of the command line.

    Args:
      settings: the values of settings by dotted key.

    >>> overrides_of({"optim.b1": 0, "optim.type": "sgd", "mesh": {"data": 2}})
    ('optim.b1=0', 'optim.type=sgd', 'mesh={"data": 2}')
    """
    return tuple(f"{key}={value_text(value)}" for key, value in settings.items())


AS_GIVEN = Variant("as given")
"""The variant without overrides."""


def parse_variants(texts: Sequence[str], *, taken: Sequence[str]) -> tuple[Variant, ...]:
    """Return the variants that texts from the command line describe.

    Args:
      texts: the texts, each of the form `NAME=key=value key2=value2`.
      taken: the names that are already in use.

    Raises:
      ConfigError: a text has no name or no setting, or a name is too long for a table, has a
        character that a table cannot show, or is in use.

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
    """Return variants with the given names and overrides.

    Args:
      pairs: pairs of a name and overrides.
      taken: the names that are already in use.
      what: the source of the variants, for error messages.

    Raises:
      ConfigError: a name is too long for a table, has a character that a table cannot show, or is
        in use.
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
                f"{what} {name!r} is the name of another variant: choose a different name"
            )
        found.append(Variant(name, overrides))
    return tuple(found)


def split_overrides(text: str) -> tuple[str, ...]:
    """Return the settings in a text, which spaces separate.

    A space inside brackets, or before a word without `=`, does not separate settings.

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
