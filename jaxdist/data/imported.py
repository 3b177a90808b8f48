"""Data of the user's own, by import path: anything with `__len__` and `__getitem__`."""

from __future__ import annotations

from typing import Any, Literal, cast

import numpy as np
from pydantic import Field

from jaxdist.config.importing import call_object, load_object
from jaxdist.config.schema import Config
from jaxdist.data.source import Dataset, Source, take
from jaxdist.errors import DataError


class ImportConfig(Config):
    """Data of your own: a Dataset, one source, or a pair (train, heldout) of sources."""

    type: Literal["import"] = "import"
    """Data of your own."""
    path: str
    """`package.module:name` of the data, or of a function that builds it."""
    args: dict[str, Any] = Field(default={})
    """Arguments of that function, by name."""
    vocab_size: int | None = None
    """Tokens are below this, where the data has tokens."""
    classes: int | None = None
    """Labels are below this, where the data has labels."""

    def build(self) -> Dataset:
        """Import, call, and look at the first and the last example.

        Raises:
          ConfigError: the import or the call fails.
          DataError: what it gives is not data.
        """
        found = load_object(self.path)
        if callable(found) or self.args:
            found = call_object(self.path, found, self.args)
        dataset = found if isinstance(found, Dataset) else self._dataset(found)
        _check(dataset.train, self.path, "train")
        if dataset.heldout is not None:
            _check(dataset.heldout, self.path, "heldout")
        return dataset

    def _dataset(self, found: Any) -> Dataset:
        pair = isinstance(found, tuple) and len(found) == 2
        train, heldout = found if pair else (found, None)
        for split in (train,) if heldout is None else (train, heldout):
            if not hasattr(split, "__len__") or not hasattr(split, "__getitem__"):
                raise DataError(
                    f"data: {self.path!r} gave a {type(split).__name__}, expected an object with "
                    "__len__ and __getitem__, a pair (train, heldout) of them, or a Dataset"
                )
        train, heldout = cast(Source, train), cast(Source | None, heldout)
        examples = len(train), len(heldout) if heldout is not None else 0
        return Dataset(
            train=train,
            heldout=heldout,
            vocab_size=self.vocab_size,
            classes=self.classes,
            description=f"import: {self.path}: {examples[0]:,} + {examples[1]:,} examples",
            facts={"train_examples": examples[0], "heldout_examples": examples[1]},
        )


def _check(source: Source, path: str, split: str) -> None:
    if len(source) == 0:
        raise DataError(f"data: {path!r} gave an empty {split} source, 0 examples")
    take(source, np.array([0, len(source) - 1]))
