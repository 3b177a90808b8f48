"""What a measurement against torch cannot do without."""

import pytest

from benchmarks.core import race
from benchmarks.core.report import lacking

needs_torch = pytest.mark.skipif(bool(lacking("torch")), reason=lacking("torch"))
needs_cores = pytest.mark.skipif(
    race.missing() is not None and "core" in str(race.missing()),
    reason="fewer than two cores, or a system that cannot keep a process on one",
)
