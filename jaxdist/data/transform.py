"""The transforms that are applied to images when they are read from a source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from jax.typing import ArrayLike
from pydantic import Field

from jaxdist.config.importing import load_object, user_code
from jaxdist.config.schema import Config
from jaxdist.data.augment import AugmentConfig
from jaxdist.data.scale import Scaled
from jaxdist.data.source import BatchSource, Dataset, Example, HostBatch, Source, take
from jaxdist.errors import DataError
from jaxdist.types import Kwargs

Transform = Callable[[HostBatch], Mapping[str, ArrayLike]]


class ScaleConfig(Scaled):
    """A transform of images to float32, (image - mean) / std; by default the values are 0 to 1."""

    type: Literal["scale"]
    """The name that selects this transform in a config."""

    def build(self) -> Transform:
        """Return the function from a batch of examples to the transformed batch."""
        return self.scaled


class ImportedTransformConfig(Config):
    """A user's transform: a function from a batch, a mapping of arrays [N, ...], to a new batch."""

    type: Literal["import"]
    """The name that selects this transform in a config."""
    path: str
    """The import path of the function, `mypkg.module:name`."""
    args: Kwargs = Field(default={})
    """The keyword arguments for the function, by name."""

    def build(self) -> Transform:
        """Return the imported function, whose errors on batches are raised as errors of the config.

        Raises:
          ConfigError: the function cannot be imported.
        """
        function, args = load_object(self.path), self.args

        def transform(batch: HostBatch) -> Mapping[str, ArrayLike]:
            with user_code(f"data.transform {self.path}"):
                found = function(batch, **args)
            if not isinstance(found, Mapping):
                raise DataError(
                    f"data.transform: {self.path} returned {type(found).__name__}, expected a "
                    "mapping of names to arrays [N, ...], like its argument"
                )
            return found

        return transform


TransformConfig = Annotated[
    ScaleConfig | AugmentConfig | ImportedTransformConfig, Field(discriminator="type")
]


def transformed(dataset: Dataset, config: TransformConfig | None) -> Dataset:
    """Return the data set with a transform of both splits, or the data set itself for None.

    Only training examples are changed at random, when the loader draws them.
    """
    if config is None:
        return dataset
    if not isinstance(config, AugmentConfig):
        transform = config.build()
        return dataset.with_sources(lambda source: _Transformed(source, transform))
    found = dataset.with_sources(lambda source: _Transformed(source, config.evaluated))
    return replace(found, train=_Augmented(dataset.train, config.evaluated, config))


@dataclass(frozen=True)
class _Transformed(BatchSource):
    """A source whose batches a function transforms."""

    source: Source
    transform: Transform

    def __len__(self) -> int:
        return len(self.source)

    def take(self, indices: np.ndarray) -> Example:
        found = self.transform(take(self.source, indices))
        batch = {name: np.asarray(values) for name, values in found.items()}
        for name, values in batch.items():
            if values.shape[:1] != (len(indices),):
                raise DataError(
                    f"data.transform gave {name!r} the shape {values.shape} for {len(indices)} "
                    "examples: return a row for each example"
                )
        return batch


@dataclass(frozen=True)
class _Augmented(_Transformed):
    """A source whose examples are changed at random when they are drawn for training."""

    config: AugmentConfig

    def draw(self, indices: np.ndarray, keys: np.ndarray) -> Example:
        return self.config.changed(self.source, indices, keys)
