"""The marker `every(n)`, with which only every n-th row of a table stays in its group."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def thin_rows(items: list[pytest.Item]) -> None:
    """Mark the rows that `every(n)` leaves out.

    Every n-th row stays in its group. In a quick test, the row after such a row becomes `full`, and
    so does a row with a value that no quick or full row has so far; all other rows become `slow`.
    In a full test, all rows except every n-th row become `slow`. If only some rows of a test are
    `full`, quick and full rows are counted separately.
    """
    tables: defaultdict[tuple[str, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("every"):
            is_full = item.get_closest_marker("full") is not None
            tables[item.nodeid.split("[")[0], is_full].append(item)
    for (_, is_full), rows in tables.items():
        _thin(rows, is_full)


def _thin(rows: list[pytest.Item], is_full: bool) -> None:
    marker = rows[0].get_closest_marker("every")
    assert marker is not None
    turns = [(index % marker.args[0], row) for index, row in enumerate(rows)]
    turns = [(turn, row) for turn, row in turns if not row.get_closest_marker("slow")]
    run = {value for turn, row in turns if turn < 2 for value in values_of(row)}
    for turn, row in turns:
        if turn:
            runs = not is_full and (turn == 1 or not values_of(row) <= run)
            row.add_marker("full" if runs else "slow")
            run |= values_of(row)


def values_of(row: pytest.Item) -> set[tuple[str, str]]:
    """Return the values of a row's columns, each with the column's name."""
    given = getattr(row, "callspec", None)
    return {(name, repr(value)) for name, value in given.params.items()} if given else set()
