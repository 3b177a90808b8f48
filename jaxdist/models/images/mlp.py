"""A multilayer perceptron on flattened images."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import jax
from flax import nnx
from pydantic import Field

from jaxdist.config.schema import Count
from jaxdist.models.hints import Hint, no_hint
from jaxdist.models.layers import DenseTower
from jaxdist.models.tuning.part import PartConfig


class MlpConfig(PartConfig):
    """A network of fully connected layers with ReLU between them."""

    type: Literal["mlp"]
    """The name that selects this model in a config."""
    hidden: Annotated[list[Count], Field(min_length=1)]
    """The width of each hidden layer."""

    def build(
        self, rngs: nnx.Rngs, *, shape: tuple[int, int, int], classes: int, hint: Hint = no_hint
    ) -> Mlp:
        """Build the module from images of `shape` (height, width, channels) to `classes` logits."""
        sizes = [math.prod(shape), *self.hidden, classes]
        return Mlp(sizes, rngs, hint)


class Mlp(DenseTower):
    """Dense layers with ReLU between them, on the pixels of an image."""

    def __call__(self, image: jax.Array) -> jax.Array:
        """Map images `[B, height, width, channels]` in 0..1 to logits `[B, classes]`."""
        return super().__call__(image.reshape(image.shape[0], -1))
