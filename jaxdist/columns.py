"""Tables of records, whose columns are declared once and shown as text, markdown or JSON."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from rich.table import Table

from jaxdist.types import Json

T = TypeVar("T")
Value = str | Callable[[T], Json]
"""The source of a column's values: the path of an attribute of the record, or a function of the
record.
"""
Columns = Mapping[str, Value[T]]
"""The columns of a table, by name."""
TEXTS = frozenset({"kind", "dtype", "what"})
"""The names of the table columns that contain words, which are aligned to the left."""


def cells(columns: Columns[T], records: Iterable[T]) -> list[tuple[Json, ...]]:
    """Return a row of cells for each record.

    >>> cells({"re": "real", "twice": lambda z: 2 * z.real}, [1.5])
    [(1.5, 3.0)]
    """
    values = [operator.attrgetter(v) if isinstance(v, str) else v for v in columns.values()]
    return [tuple(value(record) for value in values) for record in records]


def markdown(
    header: Iterable[str], rows: Iterable[Iterable[Json]], *, padded: bool = False
) -> list[str]:
    """Return the lines of a table in markdown.

    Args:
      padded: whether cells are padded, so that the columns are aligned in a terminal.

    >>> markdown(["name", "n"], [["a", 12]], padded=True)
    ['| name | n  |', '| ---- | -- |', '| a    | 12 |']
    >>> markdown(["name", "n"], [["a", 12]])[1]
    '|---|---|'
    """
    words = [list(header), *([str(cell) for cell in row] for row in rows)]
    if padded:
        widths = [max(map(len, column)) for column in zip(*words, strict=True)]
        words = [[w.ljust(width) for w, width in zip(row, widths, strict=True)] for row in words]
        words.insert(1, ["-" * width for width in widths])
    lines = [f"| {' | '.join(row)} |" for row in words]
    return lines if padded else [lines[0], "|" + "---|" * len(words[0]), *lines[1:]]


def aligned(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = ()
) -> list[str]:
    """Return the lines of a table of plain text, with two spaces between the columns.

    Args:
      rows: the cells of each row, as texts.
      left: the indices of columns of words, which are aligned to the left; negative indices count
        from the end.

    >>> print("\\n".join(aligned(["name", "MB"], [["a", "1.5"], ["both", "12"]], left=[0])))
    name   MB
    a     1.5
    both   12
    """
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    words = {index % len(header) for index in left}
    return [
        "  ".join(
            cell.ljust(width) if index in words else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def table(title: str | None, *columns: str, left: Sequence[int] = (0,)) -> Table:
    """Return an empty table; columns of words are aligned to the left, other columns to the right.

    Args:
      title: the title above the table, or None for a table without a title.
      left: the indices of columns of words that `TEXTS` does not name.
    """
    made = Table(title=title, title_justify="left", title_style="bold", show_edge=False)
    for index, column in enumerate(columns):
        words = index in left or column in TEXTS
        made.add_column(column, justify="left" if words else "right", overflow="fold")
    return made
