"""Transforms of images between their source and the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import numpy as np
from jax.typing import ArrayLike
from pydantic import Field, PositiveFloat

from jaxdist.config.importing import load_object, user_code
from jaxdist.config.schema import Config
from jaxdist.data.source import Dataset, Example, HostBatch, Source, take, take_one
from jaxdist.errors import DataError
from jaxdist.types import Kwargs

Transform = Callable[[HostBatch], Mapping[str, ArrayLike]]


class ScaleConfig(Config):
    """Convert the image to float32, (image - mean) / std; 0 to 1 by default."""

    type: Literal["scale"]
    """Selects this transform."""
    mean: float | list[float] = 0.0
    """Mean of a pixel's value, 0 to 255; a list has one entry for each channel."""
    std: PositiveFloat | list[PositiveFloat] = 255.0
    """Divisor of the difference, in the same unit; a list has one entry for each channel."""

    def build(self) -> Transform:
        """Build the function of a batch of examples.

        Raises:
          DataError: raised by that function, where a list does not have a number for each channel.
        """
        return partial(_scale, mean=self.mean, std=self.std)


class ImportedTransformConfig(Config):
    """Your own transform: a function of a batch, a mapping of arrays [N, ...], to another batch."""

    type: Literal["import"]
    """Selects this transform."""
    path: str
    """Import path of the function, `mypkg.module:name`."""
    args: Kwargs = Field(default={})
    """Keyword arguments for the function."""

    def build(self) -> Transform:
        """Import the function, and report its errors as errors of the config.

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
                    "mapping of names to arrays [N, ...], as it was given"
                )
            return found

        return transform


TransformConfig = Annotated[ScaleConfig | ImportedTransformConfig, Field(discriminator="type")]


def transformed(dataset: Dataset, config: TransformConfig | None) -> Dataset:
    """Apply a transform to both splits of a data set; None returns the data set itself."""
    if config is None:
        return dataset
    transform = config.build()
    heldout = None if dataset.heldout is None else _Transformed(dataset.heldout, transform)
    return replace(dataset, train=_Transformed(dataset.train, transform), heldout=heldout)


@dataclass(frozen=True)
class _Transformed:
    """A source whose batches are passed through a function."""

    source: Source
    transform: Transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Example:
        return take_one(self, index)

    def take(self, indices: np.ndarray) -> Example:
        found = self.transform(take(self.source, indices))
        batch = {name: np.asarray(values) for name, values in found.items()}
        for name, values in batch.items():
            if values.shape[:1] != (len(indices),):
                raise DataError(
                    f"data.transform gave {name!r} the shape {values.shape} for {len(indices)} "
                    "examples: keep the leading dim"
                )
        return batch


def _scale(batch: HostBatch, *, mean: float | list[float], std: float | list[float]) -> HostBatch:
    image = batch["image"]
    for name, values in (("mean", mean), ("std", std)):
        if isinstance(values, list) and len(values) != image.shape[-1]:
            raise DataError(
                f"data.transform.{name} has {len(values)} numbers, but images have "
                f"{image.shape[-1]} channels: give one number, or one for each channel"
            )
    centred = image.astype(np.float32) - np.asarray(mean, np.float32)
    return {**batch, "image": centred / np.asarray(std, np.float32)}
