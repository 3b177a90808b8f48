"""The conversion of pixels to numbers that are centered at 0."""

from __future__ import annotations

import numpy as np
from pydantic import PositiveFloat

from jaxdist.config.schema import Config
from jaxdist.data.source import HostBatch
from jaxdist.errors import DataError


class Scaled(Config):
    """A transform of images to float32, (image - mean) / std; by default the values are 0 to 1."""

    mean: float | list[float] = 0.0
    """The mean of a pixel's value, from 0 to 255, which is subtracted. A list has an entry for each
    channel."""
    std: PositiveFloat | list[PositiveFloat] = 255.0
    """The number by which the difference from the mean is divided. A list has an entry for each
    channel."""

    def scaled(self, batch: HostBatch) -> HostBatch:
        """Return a batch with scaled images.

        Raises:
          DataError: a list does not have a number for each channel.
        """
        image = batch["image"]
        for name, values in (("mean", self.mean), ("std", self.std)):
            if isinstance(values, list) and len(values) != image.shape[-1]:
                raise DataError(
                    f"data.transform.{name} has {len(values)} numbers, but images have "
                    f"{image.shape[-1]} channels: give one number, or one for each channel"
                )
        centred = image.astype(np.float32) - np.asarray(self.mean, np.float32)
        return {**batch, "image": centred / np.asarray(self.std, np.float32)}
