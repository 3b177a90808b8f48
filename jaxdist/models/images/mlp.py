"""A multilayer perceptron on flattened images."""

from __future__ import annotations

from typing import Annotated, Literal

import jax
from flax import nnx
from pydantic import Field

from jaxdist.config.schema import Count
from jaxdist.models.hints import Hint, no_hint
from jaxdist.models.layers import Linear
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
        return Mlp(self, rngs, shape=shape, classes=classes, hint=hint)


class Mlp(nnx.Module):
    """Dense layers with ReLU between them.

    For tensor parallelism, layers alternate: a layer that splits its outputs is followed by a layer
    that splits its inputs.
    """

    def __init__(
        self,
        config: MlpConfig,
        rngs: nnx.Rngs,
        *,
        shape: tuple[int, int, int],
        classes: int,
        hint: Hint,
    ):
        height, width, channels = shape
        sizes = [height * width * channels, *config.hidden, classes]
        names = ["features", *(("mlp", "embed")[i % 2] for i in range(len(config.hidden)))]
        init = nnx.initializers.he_normal()
        self.layers = nnx.List(
            Linear((sizes[i], sizes[i + 1]), (names[i], name), rngs, init=init)
            for i, name in enumerate([*names[1:], "classes"])
        )
        self.names, self.hint = tuple(names[1:]), hint

    def __call__(self, image: jax.Array) -> jax.Array:
        """Map images `[B, height, width, channels]` in 0..1 to logits `[B, classes]`."""
        x = image.reshape(image.shape[0], -1)
        for layer, name in zip(list(self.layers)[:-1], self.names, strict=True):
            x = self.hint(jax.nn.relu(layer(x)), "batch", name)
        return self.layers[-1](x)
