"""Data: what jaxdist reads."""

import numpy as np
from pydantic import TypeAdapter

from jaxdist.data import DataConfig
from jaxdist.data.source import Source, take

DATA = {"type": "images", "source": "digits"}


def load_data() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """All examples, to train on and held out, as arrays [N, ...] by name."""
    dataset = TypeAdapter(DataConfig).validate_python(DATA).build()
    return everything(dataset.train), everything(dataset.heldout)


def everything(source: Source | None) -> dict[str, np.ndarray]:
    """The examples of a source; there may be none held out."""
    return {} if source is None else dict(take(source, np.arange(len(source))))
