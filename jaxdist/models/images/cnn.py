"""A small convolutional network: 3x3 convolutions with pooling, then a hidden layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Annotated, Literal

import jax
from flax import nnx
from pydantic import Field

from jaxdist.config.schema import Count
from jaxdist.models.hints import Hint, no_hint
from jaxdist.models.layers import Linear, biased, param
from jaxdist.models.tuning.part import PartConfig


class CnnConfig(PartConfig):
    """A network of stages (convolution, ReLU, 2x2 max pooling), and then a hidden layer."""

    type: Literal["cnn"]
    """The name that selects this model in a config."""
    channels: Annotated[list[Count], Field(min_length=1)]
    """The number of output channels of each 3x3 convolution."""
    hidden: Count
    """The width of the hidden layer."""

    def build(
        self, rngs: nnx.Rngs, *, shape: tuple[int, int, int], classes: int, hint: Hint = no_hint
    ) -> Cnn:
        """Build the module from images of `shape` (height, width, channels) to `classes` logits."""
        return Cnn(self, rngs, shape, classes, hint)


class Conv(nnx.Module):
    """A convolution with a square window of odd size, zero padding, and channels last."""

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        rngs: nnx.Rngs,
        *,
        window: int = 3,
        stride: int = 1,
        bias: bool = True,
    ):
        dims = ("window", "window", "channels_in", "channels_out")
        init = nnx.initializers.he_normal()
        self.kernel = param(rngs, init, (window, window, channels_in, channels_out), dims)
        zeros = nnx.initializers.zeros
        self.bias = param(rngs, zeros, (channels_out,), ("channels_out",)) if bias else None
        # The padding is explicit: for a stride of 2, "SAME" would pad only at the end, but weights
        # that were trained by other frameworks expect zeros on both sides.
        self.padding = ((window // 2, window // 2),) * 2
        self.strides = (stride, stride)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x `[B, height, width, in]` to `[B, height / stride, width / stride, out]`."""
        out = jax.lax.conv_general_dilated(
            x,
            self.kernel[...].astype(x.dtype),
            self.strides,
            self.padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return biased(out, self.bias)


def max_pool(x: jax.Array) -> jax.Array:
    """Return the maximum of each square of 2x2 pixels; an odd last row or column is dropped."""
    B, height, width, C = x.shape
    even = x[:, : height // 2 * 2, : width // 2 * 2]
    return even.reshape(B, height // 2, 2, width // 2, 2, C).max(axis=(2, 4))


class Cnn(nnx.Module):
    """Convolutions with pooling, and two dense layers.

    An image with a side of one pixel is not pooled further.
    """

    def __init__(
        self, config: CnnConfig, rngs: nnx.Rngs, shape: tuple[int, ...], classes: int, hint: Hint
    ):
        height, width, channels = shape
        sizes = [channels, *config.channels]
        self.convolutions = nnx.List(
            Conv(sizes[i], sizes[i + 1], rngs) for i in range(len(config.channels))
        )
        for _ in config.channels:
            height, width = (height // 2, width // 2) if min(height, width) > 1 else (height, width)
        init = nnx.initializers.he_normal()
        flat = height * width * sizes[-1]
        self.hidden = Linear((flat, config.hidden), ("features", "mlp"), rngs, init=init)
        self.output = Linear((config.hidden, classes), ("mlp", "classes"), rngs)
        self.hint = hint

    def __call__(self, image: jax.Array) -> jax.Array:
        """Map images `[B, height, width, channels]` in 0..1 to logits `[B, classes]`."""
        return reduce(lambda x, part: part(x), self.parts(), image)

    def parts(self) -> list[Callable[[jax.Array], jax.Array]]:
        """List the parts that form pipeline stages: each convolution, then the dense layers."""
        convolved = (partial(self._convolved, convolution) for convolution in self.convolutions)
        return [*convolved, self._hidden, self.output]

    def _convolved(self, convolution: Conv, x: jax.Array) -> jax.Array:
        x = self.hint(jax.nn.relu(convolution(x)), "batch", None, None, "channels_out")
        return max_pool(x) if min(x.shape[1:3]) > 1 else x

    def _hidden(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.hidden(x.reshape(x.shape[0], -1)))
        return self.hint(x, "batch", "mlp")
