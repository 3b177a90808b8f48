"""Random changes of training images: crop, flip, cutout and mixup.

Each change is a function of a key. The key depends on the seed and on the position of the example
in the order of training. Therefore a resumed run, or a run on other hosts, makes the same changes.

Dims: N examples, H height, W width, C channels.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt

from jaxdist.config.schema import Count
from jaxdist.data.draws import Draws
from jaxdist.data.scale import Scaled
from jaxdist.data.source import HostBatch, Source, take
from jaxdist.errors import DataError

MIXED_LABEL = "mixed_label"
"""The name of a field that mixup adds, which has the label of the image that is mixed in."""
MIXED_SHARE = "mixed_share"
"""The name of a field that mixup adds, which has the share of the image that is mixed in."""


class AugmentConfig(Scaled):
    """A transform that changes training images at random, and scales all images as `scale` does.

    Held-out images are only cropped, at their centre.
    """

    type: Literal["augment"]
    """The name that selects this transform in a config."""
    crop: Count | None = None
    """The side, in pixels, of the square that is cut out of each training image at a random
    position. null keeps the image's size."""
    pad: NonNegativeInt = 0
    """The width, in pixels, of the border of zeros that is added to a training image before the
    crop."""
    flip: bool = False
    """Whether to mirror half of the training images, left to right."""
    cutout: NonNegativeInt = 0
    """The side, in pixels, of a square at a random position that is replaced by the mean (arXiv
    1708.04552). 0 replaces nothing."""
    mixup: NonNegativeFloat = 0.0
    """The parameter of the distribution Beta(mixup, mixup), from which the share of a second
    example is drawn. The image and label of the second example are mixed into the first example
    (arXiv 1710.09412). 0 mixes nothing."""

    def evaluated(self, batch: HostBatch) -> HostBatch:
        """Crop images at their centre, and scale them.

        With mixup, the batch also gets the fields of mixed labels, in which every share is 0.

        Raises:
          DataError: the images are smaller than the crop.
        """
        image = batch["image"]
        if self.crop is not None:
            top, left = _room(image, self.crop, self.crop)
            across = slice(left // 2, left // 2 + self.crop)
            image = image[:, top // 2 : top // 2 + self.crop, across]
        found = self.scaled({**batch, "image": image})
        if self.mixup:
            nothing = np.zeros(len(image), np.float32)
            found |= {MIXED_LABEL: batch["label"], MIXED_SHARE: nothing}
        return found

    def changed(self, source: Source, indices: np.ndarray, keys: np.ndarray) -> HostBatch:
        """Read examples, and change each example at random by its key.

        Args:
          source: the source of the examples, and of the images that mixup mixes in.
          indices: the indices of the examples, int64 [N].
          keys: the keys, uint64 [N].
        """
        draws = Draws(keys)
        batch = take(source, indices)
        found = self.scaled({**batch, "image": self._moved(batch["image"], draws)})
        if self.cutout:
            _cut_out(found["image"], self.cutout, draws)
        if not self.mixup:
            return found
        # The import is here, because SciPy takes 0.1 s to import and only mixup needs SciPy.
        from scipy.special import betaincinv

        partners = draws.integers(len(source))
        other = take(source, partners)
        image = self.scaled({**other, "image": self._moved(other["image"], draws)})["image"]
        # The share of the image that is mixed in is at most 1/2, so that the example's label is the
        # main label.
        drawn = betaincinv(self.mixup, self.mixup, draws.uniform())
        share = np.minimum(drawn, 1 - drawn).astype(np.float32)
        weight = share[:, None, None, None]
        found["image"] = (1 - weight) * found["image"] + weight * image
        return {**found, MIXED_LABEL: other["label"], MIXED_SHARE: share}

    def _moved(self, image: np.ndarray, draws: Draws) -> np.ndarray:
        """Pad, crop and mirror images `[N, H, W, C]` at random, with a single gather of pixels."""
        if not (self.crop or self.pad or self.flip):
            return image
        height, width = (self.crop, self.crop) if self.crop else image.shape[1:3]
        if self.pad:
            sides = (self.pad, self.pad)
            image = np.pad(image, ((0, 0), sides, sides, (0, 0)))
        rows, columns = _room(image, height, width)
        top, left = draws.integers(rows + 1), draws.integers(columns + 1)
        down = top[:, None] + np.arange(height)
        across = left[:, None] + np.arange(width)
        if self.flip:
            mirrored = draws.integers(2).astype(bool)
            across = np.where(mirrored[:, None], across[:, ::-1], across)
        return image[np.arange(len(image))[:, None, None], down[:, :, None], across[:, None, :]]


def _room(image: np.ndarray, height: int, width: int) -> tuple[int, int]:
    """Return the number of rows and the number of columns that a crop to height x width removes."""
    H, W = image.shape[1:3]
    if height > H or width > W:
        raise DataError(
            f"data.transform.crop {height} exceeds images of {H} x {W} pixels (with pad): set crop "
            f"to at most {min(H, W)}"
        )
    return H - height, W - width


def _cut_out(image: np.ndarray, side: int, draws: Draws) -> None:
    """Set a square around a random pixel of each normalized image to 0, the mean, in place."""
    H, W = image.shape[1:3]
    near = []
    for size in (H, W):
        start = draws.integers(size)[:, None] - side // 2
        places = np.arange(size)
        near.append((places >= start) & (places < start + side))
    image[near[0][:, :, None] & near[1][:, None, :]] = 0
