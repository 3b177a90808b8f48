"""A model such as a user brings: a stack of blocks with biases, in parts that stages can share."""

from __future__ import annotations

import jax
from flax import nnx

from jaxdist.models.layers import Linear, scan_blocks, stack


class Block(nnx.Module):
    """x + down(tanh(up(x))), both with biases."""

    def __init__(self, embed: int, mlp: int, rngs: nnx.Rngs):
        self.up = Linear((embed, mlp), ("embed", "mlp"), rngs)
        self.down = Linear((mlp, embed), ("mlp", "embed"), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x `[B, embed]` to the same shape."""
        return x + self.down(jax.numpy.tanh(self.up(x)))


class Tower(nnx.Module):
    """Images to logits of classes, through so many blocks."""

    def __init__(
        self, rngs: nnx.Rngs, *, features: int, classes: int, layers: int, embed: int, mlp: int
    ):
        self.first = Linear((features, embed), ("features", "embed"), rngs)
        self.blocks = stack(lambda rngs: Block(embed, mlp, rngs), layers, rngs)
        self.last = Linear((embed, classes), ("embed", "classes"), rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        """Images `[B, height, width, channels]` to logits `[B, classes]`."""
        return self.head(self.trunk(self.embed(image), image))

    def embed(self, image: jax.Array) -> jax.Array:
        """What the first block takes: `[B, embed]`."""
        return self.first(image.reshape(image.shape[0], -1))

    def trunk(self, x: jax.Array, image: jax.Array) -> jax.Array:
        """All blocks, or those of a pipeline's chunk; the image itself is not read."""
        del image
        return scan_blocks(self.blocks, x, remat="full")

    def head(self, x: jax.Array) -> jax.Array:
        """Logits."""
        return self.last(x)
