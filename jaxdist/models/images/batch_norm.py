"""A batch norm for images that reads the activations as few times as its dtype allows.

Dims: C channels; the other dims, such as batch, height and width, are averaged.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

Axes = tuple[str, ...] | str | None
"""The manual mesh axes over which statistics are averaged, or None where XLA divides the batch."""


class BatchNorm(nnx.BatchNorm):
    """A batch norm with the parameters and buffers of flax's batch norm, and faster gradients.

    The automatic gradient of the variance adds up over the activations in two passes, because the
    gradient of the mean depends on the gradient of the variance. That term is zero, so the
    derivatives here need one pass, whose sums share an all-reduce.

    The dtype of the norm decides how the variance is computed. In bfloat16 it is E[x^2] - E[x]^2 in
    float32: the two sums are computed together with the convolution before the norm, and share an
    all-reduce. If the mean is r times the deviation, this form has a relative error of about r^2
    2^-24, but the rounding of x to bfloat16 alone changes the variance by about r^2 2^-18 / 3. In
    float32 the form would lose digits that x has, and many devices would no longer agree with a
    single device, so the mean is subtracted before the squares are added up.
    """

    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Normalize x `[..., C]`, and update the running statistics in training."""
        assert mask is None, "no model of jaxdist masks pixels"
        assert self.scale is not None
        assert self.bias is not None
        stored = self.use_running_average if use_running_average is None else use_running_average
        x = x.astype(self.dtype)
        if stored:
            mean, var = self.mean[...], self.var[...]
        else:
            mean, var = _statistics(x.dtype == jnp.bfloat16, self.axis_name, x)
            for buffer, found in ((self.mean, mean), (self.var, var)):
                moved = self.momentum * buffer[...] + (1 - self.momentum) * found
                buffer[...] = jax.lax.stop_gradient(moved)
        scale = self.scale[...] * jax.lax.rsqrt(var + self.epsilon)
        # The gradient of the mean passes through `shift`, whose cotangent is the sum that the bias
        # needs as well. If the gradient passed through x - mean, this sum would be computed twice.
        center = jax.lax.stop_gradient(mean)
        shift = self.bias[...] - (mean - center) * scale
        center, scale, shift = (_along(x, value) for value in (center, scale, shift))
        return ((x.astype(jnp.float32) - center) * scale + shift).astype(self.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _statistics(one_pass: bool, axes: Axes, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the mean and the variance of each channel, in float32 `[C]`.

    Args:
      one_pass: whether the variance is E[x^2] - E[x]^2.
      axes: the manual mesh axes over which the statistics are averaged.
      x: the activations, `[..., C]`.
    """
    x = x.astype(jnp.float32)
    if one_pass:
        mean, square = _means(axes, x, jnp.square(x))
        # Rounding may leave a small negative number for a channel that is constant.
        return mean, jnp.maximum(square - jnp.square(mean), 0)
    (mean,) = _means(axes, x)
    (var,) = _means(axes, jnp.square(x - _along(x, mean)))
    return mean, var


@_statistics.defjvp
def _statistics_jvp(
    one_pass: bool, axes: Axes, given: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    """Return the statistics, and the means of dx and of 2 (x - mean) dx.

    The derivative of the variance with respect to the mean is 0, so that no term follows from it.
    """
    (x,), (dx,) = given, tangents
    mean, var = _statistics(one_pass, axes, x)
    dx, centered = dx.astype(jnp.float32), x.astype(jnp.float32) - _along(x, mean)
    return (mean, var), _means(axes, dx, 2 * centered * dx)


def _means(axes: Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the mean over all dims but the last of each array; the means share an all-reduce."""
    means = [x.mean(tuple(range(x.ndim - 1))) for x in arrays]
    return tuple(jax.lax.pmean(jnp.stack(means), axes)) if axes else tuple(means)


def _along(x: jax.Array, values: jax.Array) -> jax.Array:
    """Return one value for each channel, `[C]`, in a shape that broadcasts to `x`."""
    return values.reshape((1,) * (x.ndim - 1) + values.shape)
