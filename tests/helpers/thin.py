"""The marker `every(n)`, which lets each n-th row of a table run in place of all."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def thin_rows(items: list[pytest.Item]) -> None:
    """Mark the rows that `every(n)` leaves out.

    In a quick test, the row after one that stays becomes `full`, and the others become `slow`. In a
    full test they all become `slow`. Rows that carry `full` already are counted apart, so that each
    n-th of them stays in its part.
    """
    rows: Counter[tuple[str, bool]] = Counter()
    for item in items:
        if marker := item.get_closest_marker("every"):
            is_full = item.get_closest_marker("full") is not None
            table = (item.nodeid.split("[")[0], is_full)
            if turn := rows[table] % marker.args[0]:
                item.add_marker("slow" if is_full or turn > 1 else "full")
            rows[table] += 1
