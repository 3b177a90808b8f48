"""What a measurement against torch cannot do without."""

import pytest

from jaxdist.bench.collectives import gloo as collectives_gloo
from jaxdist.bench.zero import race as zero_race

needs_torch = pytest.mark.skipif(not collectives_gloo.has_torch(), reason=collectives_gloo.MISSING)
needs_cores = pytest.mark.skipif(
    zero_race.missing() is not None and "core" in str(zero_race.missing()),
    reason="fewer than two cores, or a system that cannot keep a process on one",
)
