"""Marks that skip a test if torch or a second core is missing."""

import pytest

from benchmarks.core import race
from benchmarks.core.report import lacking

needs_torch = pytest.mark.skipif(bool(lacking("torch")), reason=lacking("torch"))
needs_cores = pytest.mark.skipif(
    race.missing() is not None and "core" in str(race.missing()),
    reason="fewer than two cores, or a system that cannot keep a process on one",
)
