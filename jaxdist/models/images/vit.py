"""A vision transformer: patches as tokens, the blocks of `gpt`, and a mean over the patches.

The form is the simple ViT of Beyer et al. (arXiv 2205.01580), with learned positions as in the
original (Dosovitskiy et al., arXiv 2010.11929).

Dims: B batch, L patches, P pixels of a patch (with channels), D embed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.config.schema import Count
from jaxdist.errors import ConfigError
from jaxdist.models.attention.choose import Attend, choose_kernel
from jaxdist.models.bert import EncoderConfig
from jaxdist.models.gpt import Block, GptConfig
from jaxdist.models.hints import RESIDUAL, WITHIN, Hint, no_hint
from jaxdist.models.layers import LayerNorm, Linear, Stacked, param, stack


class VitConfig(EncoderConfig):
    """A vision transformer with norms before each block, gelu, and biases in all products.

    ViT-S/16 has patch 16, layers 12, embed 384, heads 6; ViT-B/16 has embed 768, heads 12.
    """

    type: Literal["vit"]
    """The name that selects this model in a config."""
    patch: Count
    """The side of a patch, in pixels, which must divide both sides of an image."""
    class_token: bool = False
    """Whether to predict the class from the state of a learned token before the patches; false
    predicts it from the mean over the patches."""

    def block(self, tokens: int) -> GptConfig:
        """Return the `GptConfig` from which the blocks are built.

        Args:
          tokens: the number of patches, plus 1 if the model has a class token.
        """
        return self.block_of(norm="layer", norm_epsilon=self.norm_epsilon, positions=tokens)

    def build(
        self,
        rngs: nnx.Rngs,
        *,
        shape: tuple[int, int, int],
        classes: int,
        hint: Hint = no_hint,
        platform: str | None = None,
        family: str = "",
    ) -> Vit:
        """Build the module from images of `shape` (height, width, channels) to `classes` logits.

        Args:
          platform: the platform of the devices, as jax names it, or None if it is unknown.
          family: the short name of the devices, such as v5e; "" means unknown.

        Raises:
          ConfigError: the patch does not divide the image; the attention kernel does not support
            these devices.
        """
        height, width, channels = shape
        if height % self.patch or width % self.patch:
            common = math.gcd(height, width)
            fitting = [n for n in range(1, common + 1) if common % n == 0]
            near = min(fitting, key=lambda n: abs(n - self.patch))
            raise ConfigError(
                f"model.patch {self.patch} must divide images of {height} x {width} "
                f"pixels: use {near}, or change data.size",
                setting=("patch",),
            )
        tokens = height // self.patch * (width // self.patch) + self.class_token
        block = self.block(tokens)
        ask = replace(block.ask(platform, hint, tokens, family), causal=False)
        choose_kernel(self.attention, ask)
        attend = Attend(self.attention, ask, hint)
        return Vit(self, block, rngs, channels=channels, classes=classes, hint=hint, attend=attend)


class Vit(Stacked):
    """A model from images `[B, height, width, channels]` in 0..1 to logits `[B, classes]`."""

    def __init__(
        self,
        config: VitConfig,
        block: GptConfig,
        rngs: nnx.Rngs,
        *,
        channels: int,
        classes: int,
        hint: Hint,
        attend: Attend,
    ):
        self.config, self.hint = config, hint
        self.remat, self.unroll = config.remat, config.scan_unroll
        D, P, L = config.embed, config.patch**2 * channels, block.positions or 0
        self.patches = Linear((P, D), ("features", "embed"), rngs)
        init = nnx.initializers.normal(0.02)
        if config.class_token:
            self.class_token = param(rngs, init, (1, D), (None, "embed"))
        self.positions = param(rngs, init, (L, D), (None, "embed"))
        self.blocks = stack(lambda r: Block(block, r, hint, attend), config.layers, rngs)
        self.norm = LayerNorm(D, rngs, epsilon=config.norm_epsilon)
        self.output = Linear((D, classes), ("embed", "classes"), rngs)

    def embed(self, image: jax.Array) -> jax.Array:
        """Embed the patches of images, row by row, as `[B, L, D]` in the compute dtype.

        If the config has a class token, this token comes first.
        """
        with jax.named_scope("embed"):
            B, height, width, channels = image.shape
            side = self.config.patch
            grid = image.reshape(B, height // side, side, width // side, side, channels)
            x_BLP = grid.swapaxes(2, 3).reshape(B, -1, side * side * channels)
            x_BLD = self.patches(x_BLP.astype(jnp.dtype(self.config.compute_dtype)))
            if self.config.class_token:
                first_1D = self.class_token[...].astype(x_BLD.dtype)
                first_B1D = jnp.broadcast_to(first_1D[None], (B, *first_1D.shape))
                x_BLD = jnp.concatenate([first_B1D, x_BLD], 1)
            x_BLD = x_BLD + self.positions[...][None].astype(x_BLD.dtype)
        return self.hint(self.hint(x_BLD, *WITHIN), *RESIDUAL, was=WITHIN)

    def operands(self, image: jax.Array) -> tuple[None]:
        """Return (None,): blocks get no document numbers, because an image is a single document."""
        del image
        return (None,)

    def head(self, x_BLD: jax.Array) -> jax.Array:
        """Return logits `[B, classes]` of the class token, or of the mean over the patches."""
        with jax.named_scope("head"):
            x_BLD = self.norm(self.hint(x_BLD, *WITHIN, was=RESIDUAL))
            if self.config.class_token:
                return self.output(x_BLD[:, 0].astype(jnp.float32))
            # The mean is taken in float32, because a sum of many pixels in bfloat16 rounds most of
            # them away.
            return self.output(x_BLD.astype(jnp.float32).mean(1))
