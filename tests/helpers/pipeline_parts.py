"""User models that consist of parts, for `model: {type: import}`, and an optimizer."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxdist.models.layers import param

_INIT = nnx.initializers.normal(0.2)


class Tied(nnx.Module):
    """A model with a table that two parts use, and with a table that no part uses."""

    def __init__(self, rngs, *, table="float32", fault=None):
        made = _INIT(rngs.params(), (64, 16), jnp.float32).astype(table)
        self.table = nnx.Param(made, dims=("features", "mlp"))
        self.out = param(rngs, _INIT, (64, 10), ("features", "classes"))
        self.unused = param(rngs, _INIT, (3,), ("mlp",))
        self.fault = fault
        if fault == "buffers":
            self.seen = nnx.Variable(jnp.zeros(()))

    def __call__(self, image):
        for part in self.parts():
            image = part(image)
        return image

    def parts(self):
        return [self.encode, jnp.tanh, self.decode, lambda x: x @ self.out[...]]

    def encode(self, image):
        return image.reshape(len(image), -1) @ self.table[...].astype(image.dtype)

    def decode(self, x):
        if self.fault == "rows":
            return x[:1]
        if self.fault == "dtype":
            x = x.astype(jnp.bfloat16)
        y = jax.nn.relu(x @ self.table[...].astype(x.dtype).T)
        return (y,) if self.fault == "tuple" else y


def sm3(rate):
    """Return SM3, whose state has a vector for each dim of each parameter."""
    return optax.chain(optax.scale_by_sm3(), optax.scale_by_learning_rate(rate))
