"""What a measurement against torch cannot do without."""

import pytest

from benchmarks.collectives import gloo as collectives_gloo
from benchmarks.core import race

needs_torch = pytest.mark.skipif(not collectives_gloo.has_torch(), reason=collectives_gloo.MISSING)
needs_cores = pytest.mark.skipif(
    race.missing() is not None and "core" in str(race.missing()),
    reason="fewer than two cores, or a system that cannot keep a process on one",
)
