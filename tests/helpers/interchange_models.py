"""A linen model that no table of jaxdist describes, because its names and layouts differ."""

import jax.numpy as jnp
from flax import linen

from jaxdist.models.adapters import from_linen


class Net(linen.Module):
    @linen.compact
    def __call__(self, image, train=True):
        x = image.reshape(len(image), -1)
        x = linen.BatchNorm(use_running_average=not train, name="norm")(x)
        for i in range(2):
            x = linen.relu(linen.Dense(6, name=f"layer{i}")(x))
        return linen.Dense(3, use_bias=False, name="head")(x)


def net(rngs):
    return from_linen(Net(), jnp.zeros((1, 2, 2, 1)))(rngs)
