"""Rows of a sweep by name: few of them in quick tests, and the rest in full ones or on demand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(*few: str, of: Iterable[str], slow: bool = False) -> list[Any]:
    """The names of a table, of which all but few are marked: slow are those that few stand for."""
    names = list(of)
    assert set(few) <= set(names), few
    rest = pytest.mark.slow if slow else pytest.mark.full
    return [pytest.param(n, marks=() if n in few else rest) for n in names]
