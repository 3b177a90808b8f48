"""Data: the examples, which jaxdist reads."""

import numpy as np
from pydantic import TypeAdapter

from jaxdist.data import DataConfig
from jaxdist.data.source import Source, take

DATA = {"type": "images", "source": "digits"}


def load_data() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the training split and the held-out split, as arrays [N, ...] by name."""
    dataset = TypeAdapter(DataConfig).validate_python(DATA).build()
    return everything(dataset.train), everything(dataset.heldout)


def everything(source: Source | None) -> dict[str, np.ndarray]:
    """Return the examples of a source, or an empty dict without a source."""
    return {} if source is None else dict(take(source, np.arange(len(source))))
