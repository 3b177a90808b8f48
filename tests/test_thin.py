"""Which rows of a table the marker `every(n)` leaves to a later part of `.ci/run`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from thin import thin_rows


class Row(pytest.Item):
    def runtest(self) -> None:
        """Do nothing, since only the marks count."""


def row(request: pytest.FixtureRequest, name: str, *marks: pytest.MarkDecorator) -> pytest.Item:
    item = Row.from_parent(request.node.parent, name=name)
    for mark in marks:
        item.add_marker(mark)
    return item


def test_of_three_rows_one_stays_and_one_comes_next(request: pytest.FixtureRequest) -> None:
    items = [row(request, f"test_table[{i}]", pytest.mark.every(3)) for i in range(6)]
    for item, value in zip(items, "aabaab", strict=True):
        item.__dict__["callspec"] = SimpleNamespace(params={"column": value})
    thin_rows(items)
    marks = [[mark.name for mark in item.iter_markers() if mark.name != "every"] for item in items]
    assert marks == [[], ["full"], ["full"], [], ["full"], ["slow"]], "the first b is new"


def test_each_second_row_stays_in_its_part(request: pytest.FixtureRequest) -> None:
    every, full = pytest.mark.every(2), pytest.mark.full
    items = [
        *(row(request, f"test_table[{i}]", every) for i in range(3)),
        *(row(request, f"test_table[{i}]", every, full) for i in range(3, 6)),
        *(row(request, f"test_whole[{i}]") for i in range(2)),
    ]
    thin_rows(items)
    marked = {
        mark: [item.name for item in items if item.get_closest_marker(mark)]
        for mark in ("full", "slow")
    }
    assert marked == {
        "full": ["test_table[1]", *(f"test_table[{i}]" for i in range(3, 6))],
        "slow": ["test_table[4]"],
    }
