"""The types that servers, workers and the simulator share: named arrays, and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxdist.types import Dims, PyTree

Arrays = Mapping[str, np.ndarray]
"""The parameters, gradients or changes by name."""
RuleState = PyTree
"""The state that an update rule carries for a range from one update to the next."""


def vectors(dims: Mapping[str, Dims]) -> frozenset[str]:
    """Return the names of the parameters with fewer than two dims; `layers` does not count.

    Such parameters are small, and a codec harms them most, so pushes carry them uncompressed.

    >>> sorted(vectors({"kernel": ("embed", "mlp"), "scale": ("layers", "embed")}))
    ['scale']
    """
    return frozenset(name for name, own in dims.items() if sum(dim != "layers" for dim in own) < 2)
