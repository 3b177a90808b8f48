"""A model as a user's own: a stack of blocks with biases, which stages can share, and BatchNorm."""

from __future__ import annotations

import jax
from flax import nnx

from jaxdist.models.layers import Linear, scan_blocks, stack


class TowerBlock(nnx.Module):
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
        # The fast variance, a difference of two means, is rounded by more than parity allows.
        norm = nnx.BatchNorm(embed, use_fast_variance=False, rngs=rngs) if batch_norm else None
        self.norm = norm
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None
        self.last = Linear((embed, classes), ("embed", "classes"), rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        """Images `[B, height, width, channels]` to logits `[B, classes]`."""
        return self.head(self.trunk(self.embed(image), image))

    def embed(self, image: jax.Array) -> jax.Array:
        """What the first block takes: `[B, embed]`."""
        x = self.first(image.reshape(image.shape[0], -1))
        # Of a bias right before a BatchNorm the gradient would be rounding and nothing else.
        return x if self.norm is None else self.norm(x * jax.numpy.tanh(x))

    def trunk(self, x: jax.Array, image: jax.Array) -> jax.Array:
        """All blocks, or those of a pipeline's chunk; the image itself is not read."""
        del image
        return scan_blocks(self.blocks, x, remat="full")

    def head(self, x: jax.Array) -> jax.Array:
        """Logits."""
        return self.last(x if self.dropout is None else self.dropout(x))
