"""The imported models of draws, as users would write them: with nnx, flax linen and equinox."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen, nnx

from jaxdist.models.adapters import from_equinox, from_linen
from jaxdist.models.layers import Linear, scan_blocks, stack


class TowerBlock(nnx.Module):
    """A residual block that computes x + down(tanh(up(x))), with biases in both layers."""

    def __init__(self, embed: int, mlp: int, rngs: nnx.Rngs):
        self.up = Linear((embed, mlp), ("embed", "mlp"), rngs)
        self.down = Linear((mlp, embed), ("mlp", "embed"), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the block to x `[B, embed]`; the result has the same shape."""
        return x + self.down(jax.numpy.tanh(self.up(x)))


class Tower(nnx.Module):
    """A classifier of images with a stack of residual blocks.

    BatchNorm before the first block and dropout before the last layer are optional.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        *,
        features: int,
        classes: int,
        layers: int,
        embed: int,
        mlp: int,
        batch_norm: bool = False,
        dropout: float = 0.0,
    ):
        self.first = Linear((features, embed), ("features", "embed"), rngs)
        self.blocks = stack(lambda rngs: TowerBlock(embed, mlp, rngs), layers, rngs)
        # The fast variance is turned off: it is a difference of two means, whose rounding error
        # would exceed the limits.
        norm = nnx.BatchNorm(embed, use_fast_variance=False, rngs=rngs) if batch_norm else None
        self.norm = norm
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None
        self.last = Linear((embed, classes), ("embed", "classes"), rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        """Map images `[B, height, width, channels]` to logits `[B, classes]`."""
        return self.head(self.trunk(self.embed(image), image))

    def embed(self, image: jax.Array) -> jax.Array:
        """Return the input of the first block, `[B, embed]`, for images."""
        x = self.first(image.reshape(image.shape[0], -1))
        # BatchNorm subtracts the mean, so that the exact gradient of a bias directly before a
        # BatchNorm is 0, and only rounding would be compared. The product with tanh gives the bias
        # a gradient.
        return x if self.norm is None else self.norm(x * jax.numpy.tanh(x))

    def trunk(self, x: jax.Array, image: jax.Array) -> jax.Array:
        """Return the output of all blocks, or of the blocks in a pipeline's chunk.

        The image is not used.
        """
        del image
        return scan_blocks(self.blocks, x, remat="full")

    def head(self, x: jax.Array) -> jax.Array:
        """Map the output of the last block to logits `[B, classes]`."""
        return self.last(x if self.dropout is None else self.dropout(x))


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
