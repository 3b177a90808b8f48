"""Residual networks for images: ResNet-18, 34 and 50, version 1.5 (He et al., arXiv 1512.03385).

Dims: B batch, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import Field, model_validator

from jaxdist.config.schema import Count
from jaxdist.models.hints import Hint, no_hint
from jaxdist.models.images.batch_norm import BatchNorm
from jaxdist.models.images.cnn import Conv
from jaxdist.models.layers import ComputeDtype, Linear
from jaxdist.models.tuning.part import PartConfig

_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
_EXPANSION = 4
"""The number of a bottleneck block's output channels per channel of its 3x3 convolution."""


class ResnetConfig(PartConfig):
    """A residual network, version 1.5, in which a bottleneck's 3x3 convolution has the stride."""

    type: Literal["resnet"]
    """The name that selects this model in a config."""
    depth: Literal[18, 34, 50] | None = None
    """The depth of a network of the paper, which is its number of layers with weights; 50 has
    bottlenecks. null is for a network whose `blocks` are set."""
    blocks: Annotated[list[Count], Field(min_length=1)] | None = None
    """The number of blocks of each stage, which replaces depth. For example, [3, 3, 3] with width
    16 and the stem cifar is the paper's ResNet-20."""
    bottleneck: bool | None = None
    """Whether blocks have three convolutions (1x1, 3x3, 1x1) instead of two 3x3 convolutions; null
    follows depth."""
    width: Count = 64
    """The number of channels of the first stage. Each later stage has twice as many channels as the
    stage before it."""
    stem: Literal["imagenet", "cifar"] = "imagenet"
    """The first layers. imagenet has a 7x7 convolution with stride 2 and a max pooling, which
    divide the sides of the image by 4. cifar has a 3x3 convolution that keeps the size, for images
    of about 32 pixels."""
    norm: Literal["batch", "group"] = "batch"
    """The norm. batch uses statistics of the whole batch, or of a device's rows with
    `parallel.batch_norm: local`. group has no state, and also runs in pipelines."""
    groups: Annotated[int, Field(ge=1)] = 32
    """The number of groups of channels of the group norm, which must divide width."""
    compute_dtype: ComputeDtype = "float32"
    """The dtype of activations and convolutions; parameters and statistics are float32."""

    @model_validator(mode="after")
    def _check(self) -> ResnetConfig:
        if (self.depth is None) == (self.blocks is None):
            raise ValueError("give either depth (18, 34 or 50) or blocks (a list of counts)")
        if self.norm == "group" and self.width % self.groups:
            near = max(n for n in range(1, min(self.groups, self.width) + 1) if self.width % n == 0)
            raise ValueError(f"groups {self.groups} must divide width {self.width}: use {near}")
        return self

    @property
    def stages(self) -> Sequence[int]:
        """The number of blocks of each stage."""
        return self.blocks or _BLOCKS[self.depth or 18]

    @property
    def expansion(self) -> int:
        """The number of a block's output channels per channel of its 3x3 convolutions."""
        bottleneck = self.depth == 50 if self.bottleneck is None else self.bottleneck
        return _EXPANSION if bottleneck else 1

    def build(
        self, rngs: nnx.Rngs, *, shape: tuple[int, int, int], classes: int, hint: Hint = no_hint
    ) -> Resnet:
        """Build the module from images of `shape` (height, width, channels) to `classes` logits."""
        return Resnet(self, rngs, channels=shape[-1], classes=classes, hint=hint)


def _norm(config: ResnetConfig, channels: int, rngs: nnx.Rngs, *, scale: float = 1.0) -> nnx.Module:
    init, dtype = nnx.initializers.constant(scale), jnp.dtype(config.compute_dtype)
    given: dict[str, Any] = {"scale_init": init, "dtype": dtype, "epsilon": 1e-5, "rngs": rngs}
    if config.norm == "group":
        norm = nnx.GroupNorm(channels, num_groups=config.groups, use_fast_variance=False, **given)
    else:
        norm = BatchNorm(channels, momentum=0.9, **given)
    for parameter in (norm.scale, norm.bias):
        assert parameter is not None
        parameter.set_metadata(dims=("channels_out",))
    return norm


class ResidualBlock(nnx.Module):
    """A residual block: two 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1."""

    def __init__(
        self,
        config: ResnetConfig,
        channels_in: int,
        channels: int,
        stride: int,
        rngs: nnx.Rngs,
        hint: Hint,
    ):
        channels_out = channels * config.expansion
        # Each entry describes a convolution: (output channels, size of the window, stride).
        plan = [(channels, 3, stride), (channels, 3, 1)]
        if config.expansion > 1:
            plan = [(channels, 1, 1), (channels, 3, stride), (channels_out, 1, 1)]
        sizes = [channels_in, *(size for size, _, _ in plan)]
        self.convolutions = nnx.List(
            Conv(sizes[i], size, rngs, window=window, stride=step, bias=False)
            for i, (size, window, step) in enumerate(plan)
        )
        # The last scale starts at 0, so that a block starts as the identity (arXiv 1706.02677).
        self.norms = nnx.List(
            _norm(config, size, rngs, scale=float(i < len(plan) - 1))
            for i, (size, _, _) in enumerate(plan)
        )
        self.shortcut = nnx.List[nnx.Module]([])
        if stride > 1 or channels_in != channels_out:
            resized = Conv(channels_in, channels_out, rngs, window=1, stride=stride, bias=False)
            self.shortcut = nnx.List([resized, _norm(config, channels_out, rngs)])
        self.hint = hint

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x `[B, height, width, C]` to `[B, height / stride, width / stride, C']`."""
        rest = x
        for part in self.shortcut:
            rest = part(rest)
        last = len(self.convolutions) - 1
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = norm(self.hint(convolution(x), "batch", None, None, "channels_out"))
            x = x if i == last else jax.nn.relu(x)
        return jax.nn.relu(x + rest)


class Resnet(nnx.Module):
    """A stem, stages of residual blocks, the mean over pixels, and a dense layer."""

    def __init__(
        self, config: ResnetConfig, rngs: nnx.Rngs, *, channels: int, classes: int, hint: Hint
    ):
        large = config.stem == "imagenet"
        window, stride = (7, 2) if large else (3, 1)
        self.stem = Conv(channels, config.width, rngs, window=window, stride=stride, bias=False)
        self.stem_norm = _norm(config, config.width, rngs)
        blocks, channels_in = [], config.width
        for stage, count in enumerate(config.stages):
            for i in range(count):
                stride = 2 if stage and i == 0 else 1
                channels = config.width * 2**stage
                blocks.append(ResidualBlock(config, channels_in, channels, stride, rngs, hint))
                channels_in = channels * config.expansion
        self.blocks = nnx.List(blocks)
        self.output = Linear((channels_in, classes), ("channels_in", "classes"), rngs)
        self.pooled, self.hint = large, hint
        self.dtype = jnp.dtype(config.compute_dtype)

    def __call__(self, image: jax.Array) -> jax.Array:
        """Map images `[B, height, width, channels]` to logits `[B, classes]`."""
        return reduce(lambda x, part: part(x), self.parts(), image)

    def parts(self) -> list[Callable[[jax.Array], jax.Array]]:
        """List the parts that form pipeline stages: the stem, each block, and the head."""
        return [self._first, *self.blocks, self._head]

    def _first(self, image: jax.Array) -> jax.Array:
        x = self.hint(self.stem(image.astype(self.dtype)), "batch", None, None, "channels_out")
        x = jax.nn.relu(self.stem_norm(x))
        return _max_pool(x) if self.pooled else x

    def _head(self, x: jax.Array) -> jax.Array:
        # The mean is taken in float32, because a sum of many pixels in bfloat16 rounds most of them
        # away.
        return self.output(x.astype(jnp.float32).mean((1, 2)))


def _max_pool(x: jax.Array) -> jax.Array:
    """Return the maximum of each 3x3 window of pixels, with stride 2; padding counts as -inf."""
    sides = ((0, 0), (1, 1), (1, 1), (0, 0))
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), sides)
