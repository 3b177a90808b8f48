"""The table of refused combinations, with the features, the reason and the remedy of each.

A row has groups of features. A config is refused if, for some row, it has at least one feature of
each of the row's groups. The table is therefore both the check of a config and the source of the
matrix in the docs, which `python -m jaxdist.validity` prints.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template

from jaxdist.errors import ConfigError
from jaxdist.models.mean import AS_MEAN, OPAQUE
from jaxdist.validity.features import Facts
from jaxdist.validity.row import ValidityRow, members

_TEXTS = {"AS_MEAN": AS_MEAN, "OPAQUE": OPAQUE}
"""The texts in rows that other messages have too."""


def _rows() -> Iterator[ValidityRow]:
    table = tomllib.loads(Path(__file__).with_name("table.toml").read_text(encoding="utf-8"))
    for row in table["rows"]:
        for feature in members(row.get("each", [""])):
            texts = {**_TEXTS, "each": feature}

            def filled(text: str, texts: Mapping[str, str] = texts) -> str:
                return Template(text).substitute(texts)

            yield ValidityRow(
                tuple(tuple(map(filled, members(group))) for group in row["features"]),
                filled(row["why"]),
                filled(row["instead"]),
                tuple(filled(row.get("setting", "parallel")).split(".")),
                row.get("heading", ""),
            )


ROWS = tuple(_rows())
"""The rows for all combinations that are refused."""


def violations(facts: Facts) -> list[str]:
    """Return a sentence for each refused combination of a config: settings, reason and remedy.

    >>> from jaxdist.collectives.algorithms.hierarchical import Hierarchical
    >>> print(*violations(Facts({"data": 8}, ("data",), Hierarchical(type="hierarchical"))))
    ... # doctest: +ELLIPSIS
    parallel.reduce.type hierarchical with mesh {data: 8}: this reduction sums ...
    """
    return [problem for row in ROWS if (problem := row.problem(facts)) is not None]


def check(facts: Facts) -> None:
    """Check that a config has no refused combination of settings.

    Raises:
      ConfigError: a row of the table applies. There is an error for each setting that causes a
        refusal, with the path of the setting in the complete config. The first error is raised, and
        its attribute `more` has the other errors.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    for row in ROWS:
        problem = row.problem(facts)
        if problem is not None:
            found.setdefault(row.setting, []).append(problem)
    errors = [ConfigError("\n".join(lines), setting=path) for path, lines in found.items()]
    if errors:
        first, *more = errors
        raise ConfigError(str(first), setting=first.setting, more=more)
