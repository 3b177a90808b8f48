"""The imported models and data of draws: models of flax linen and equinox, and weighted data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import linen, nnx
from pydantic import TypeAdapter

from jaxdist.data import DataConfig
from jaxdist.data.permutation import mix
from jaxdist.data.source import Dataset, Example, Source, take, take_one
from jaxdist.models.adapters import from_equinox, from_linen
from jaxdist.types import Json, JsonObject

WEIGHTS = np.array([0, 0, 0, 0.5, 1, 1, 2, 3], np.float32)
"""The weights of examples. A hash of the example's index selects its weight."""


class LinenNet(linen.Module):
    """A classifier of images with two convolutions, and an optional batch norm between them."""

    channels: int
    classes: int
    batch_norm: bool

    @linen.compact
    def __call__(self, image: jax.Array, train: bool = False) -> jax.Array:
        """Map images `[B, height, width, channels]` to logits `[B, classes]`."""
        x = linen.Conv(self.channels, (3, 3), use_bias=not self.batch_norm)(image)
        if self.batch_norm:
            # The fast variance is turned off: it is a difference of two means, whose rounding error
            # would exceed the limits on differences.
            norm = linen.BatchNorm(use_running_average=not train, use_fast_variance=False)
            x = norm(x * jax.numpy.tanh(x))
        x = linen.Conv(self.channels, (3, 3), strides=2)(jax.numpy.tanh(x))
        return linen.Dense(self.classes)(jax.numpy.tanh(x).reshape(x.shape[0], -1))


def linen_net(
    rngs: nnx.Rngs, *, shape: list[int], channels: int, classes: int, batch_norm: bool
) -> nnx.Module:
    """Return a `LinenNet` for images of a shape.

    `model: {type: import}` names this function, with its keyword arguments as `args`.
    """
    net = LinenNet(channels, classes, batch_norm)
    return from_linen(net, jax.numpy.zeros((1, *shape)))(rngs)


def equinox_net(rngs: nnx.Rngs, *, features: int, width: int, classes: int) -> nnx.Module:
    """Return an MLP of equinox for images with `features` values.

    `model: {type: import}` names this function, with its keyword arguments as `args`.
    """
    import equinox  # Equinox is imported here, since it is an optional dependency.

    class Net(equinox.Module):
        mlp: Any

        def __init__(self, key: jax.Array):
            self.mlp = equinox.nn.MLP(features, classes, width, 2, jax.numpy.tanh, key=key)

        def __call__(self, image: jax.Array) -> jax.Array:
            return self.mlp(image.reshape(-1))

    return from_equinox(Net)(rngs)


@dataclass(frozen=True)
class Weighted:
    """A source that adds a weight to each example of another source.

    About three examples of eight have weight 0.
    """

    source: Source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Example:
        return take_one(self, index)

    def take(self, indices: np.ndarray) -> Example:
        """Return the N examples at `indices`, with their weights, float32 `[N]`, as "weight"."""
        weights = WEIGHTS[mix(indices.astype(np.uint64)) % len(WEIGHTS)]
        return {**take(self.source, indices), "weight": weights}


def weighted_dataset(data: Mapping[str, Json]) -> Dataset:
    """Return the dataset of a section `data`, with a weight that depends on an example's index."""
    made = TypeAdapter[DataConfig](DataConfig).validate_python(data).build()
    heldout = None if made.heldout is None else Weighted(made.heldout)
    return replace(made, train=Weighted(made.train), heldout=heldout)


def with_weights(data: JsonObject) -> JsonObject:
    """Return a section `data` for the same examples with unequal weights."""
    path = f"{__name__}:{weighted_dataset.__name__}"
    return {"type": "import", "path": path, "args": {"data": data}}


def weighted_synthetic(**config: Mapping[str, Json]) -> Dataset:
    """Return the dataset of `data: {type: synthetic}` with unequal weights of its examples.

    Args:
      config: the other settings of the section `data`.
    """
    return weighted_dataset({"type": "synthetic", **config})
