"""A classifier of digits whose parameters are bfloat16."""

import jax.numpy as jnp
from flax import nnx


class Model(nnx.Module):
    def __init__(self, rngs):
        self.b = nnx.Param(jnp.zeros(10, jnp.bfloat16), dims=("classes",))
        self.w = nnx.Param(
            rngs.normal((64, 10)).astype(jnp.bfloat16) / 8, dims=("features", "classes")
        )

    def __call__(self, image):
        flat = image.reshape(len(image), -1).astype(jnp.bfloat16)
        return (flat @ self.w[...] + self.b[...][None]).astype(jnp.float32)
