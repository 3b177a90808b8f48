"""Data that the user imports: any object with `__len__` and `__getitem__`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
from pydantic import Field

from jaxdist.config.importing import call_object, load_object
from jaxdist.config.schema import Config, Count
from jaxdist.data.source import Dataset, Source, length, take
from jaxdist.errors import DataError
from jaxdist.types import Kwargs


class ImportConfig(Config):
    """A user's data: a Dataset, a source to train on, or a pair (train, heldout) of sources."""

    type: Literal["import"] = "import"
    """The name that selects your own data in a config."""
    path: str
    """The import path `package.module:name` of the data, or of a function that builds the data."""
    args: Kwargs = Field(default={})
    """The keyword arguments for the imported function, by name."""
    vocab_size: Count | None = None
    """The size of the vocabulary: `tokens` are numbers from 0 to vocab_size - 1. null is for data
    without tokens."""
    classes: Count | None = None
    """The number of classes: `label` is a number from 0 to classes - 1. null is for data without
    labels."""
    unchecked: list[str] = Field(default=[])
    """The names of the fields that may hold numbers out of range, NaN or infinity, because your
    model uses these values. All other fields are checked."""

    def build(self) -> Dataset:
        """Import the data, or call the imported function, and check the first and last example.

        Raises:
          ConfigError: the import or the call fails.
          DataError: the result is not a Dataset, a source or a pair of sources.
        """
        found = load_object(self.path)
        if callable(found) or self.args:
            found = call_object(self.path, found, self.args)
        dataset = self._declared(found if isinstance(found, Dataset) else self._dataset(found))
        self._check(dataset, dataset.train, "training split")
        if dataset.heldout is not None:
            self._check(dataset, dataset.heldout, "held-out split")
        return dataset

    def _declared(self, dataset: Dataset) -> Dataset:
        """Return the data set, in which the config's settings override the data set's own."""
        said = {"vocab_size": self.vocab_size, "classes": self.classes}
        given = {name: value for name, value in said.items() if value is not None}
        return replace(dataset, **given, unchecked=dataset.unchecked | set(self.unchecked))

    def _dataset(self, found: Any) -> Dataset:
        pair = isinstance(found, tuple) and len(found) == 2
        train, heldout = found if pair else (found, None)
        for split in (train,) if heldout is None else (train, heldout):
            if not hasattr(split, "__len__") or not hasattr(split, "__getitem__"):
                raise DataError(
                    f"data: {self.path!r} gave a {type(split).__name__}, expected an object with "
                    "__len__ and __getitem__, a pair (train, heldout) of such objects, or a "
                    "Dataset"
                )
        train, heldout = cast(Source, train), cast(Source | None, heldout)
        examples = (
            self._length(train, "training split"),
            self._length(heldout, "held-out split") if heldout is not None else 0,
        )
        return Dataset(
            train=train,
            heldout=heldout,
            description=f"import: {self.path}: {examples[0]:,} + {examples[1]:,} examples",
        )

    def _length(self, source: Source, split: str) -> int:
        return length(source, f"the {split} of {self.path!r}")

    def _check(self, dataset: Dataset, source: Source, split: str) -> None:
        ends = np.array([0, self._length(source, split) - 1])
        batch = take(source, ends)
        absent = sorted(set(self.unchecked) - set(batch))
        if absent:
            raise DataError(
                f"data.unchecked names {', '.join(absent)}, but the {split} has only the keys "
                f"{sorted(batch)}: remove the absent keys from data.unchecked"
            )
        dataset.allowed.check(batch, ends, split)
