"""The division of the rows of a sweep into quick rows and full or slow rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(*few: str, of: Iterable[str], slow: bool = False) -> list[Any]:
    """Return the names `of` as parameters of a test, all marked except the names in `few`.

    The mark is `full`, or `slow` if `slow` is true.
    """
    names = list(of)
    assert set(few) <= set(names), few
    rest = pytest.mark.slow if slow else pytest.mark.full
    return [pytest.param(n, marks=() if n in few else rest) for n in names]
