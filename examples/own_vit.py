"""Train a vision transformer on data and with a loss of your own, on any mesh.

    python examples/own_vit.py parallel.zero.stage=3                # on 8 fake devices
    python examples/own_vit.py 'mesh={data: 2, tensor: 4}'
    python examples/own_vit.py 'mesh={data: 2, stage: 4}' train.microbatches=4

The program prints the progress of `jaxdist train`, then the held-out accuracy on handwritten
digits: 0.65 after 60 steps. All three plans compute the same numbers. The run is in runs/own_vit.
"""

from __future__ import annotations

import sys
from typing import Any

import jaxdist

jaxdist.prepare(fake_devices=8)  # jax reads the environment when it is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

from jaxdist.models.layers import LayerNorm, Linear, Stacked, param, stack  # noqa: E402


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        init, inner = nnx.initializers.lecun_normal(), ("heads", "head_dim")
        shape = (width, heads, width // heads)
        self.q, self.k, self.v = (param(rngs, init, shape, ("embed", *inner)) for _ in range(3))
        self.out = param(rngs, init, (*shape[1:], width), (*inner, "embed"))
        self.up = Linear((width, 4 * width), ("embed", "mlp"), rngs)
        self.down = Linear((4 * width, width), ("mlp", "embed"), rngs)
        self.norms = nnx.List([LayerNorm(width, rngs), LayerNorm(width, rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norms[0](x)
        q, k, v = (jnp.einsum("bld,dhk->blhk", h, w[...]) for w in (self.q, self.k, self.v))
        weights = jax.nn.softmax(jnp.einsum("bihk,bjhk->bhij", q, k) * q.shape[-1] ** -0.5)
        x = x + jnp.einsum("bhij,bjhk,hkd->bid", weights, v, self.out[...])
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Vit(Stacked):
    def __init__(self, rngs: nnx.Rngs, width: int, heads: int, layers: int):
        self.patches = Linear((4, width), ("features", "embed"), rngs)
        init = nnx.initializers.normal(0.02)
        self.positions = param(rngs, init, (16, width), (None, "embed"))
        self.blocks = stack(lambda rngs: Block(width, heads, rngs), layers, rngs)
        self.output = Linear((width, 10), ("embed", "classes"), rngs)

    def embed(self, image: jax.Array) -> jax.Array:  # 8 x 8 pixels as 16 patches of 2 x 2
        patches = image.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4)
        return self.patches(patches) + self.positions[...][None]

    def head(self, x: jax.Array) -> jax.Array:
        return self.output(x.mean(1))


class Digits:
    def __init__(self, part: slice):
        self.image, self.label = (array[part] for array in load_digits(return_X_y=True))

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"image": self.image[i] / 16, "label": self.label[i]}


def data() -> tuple[Digits, Digits]:
    return Digits(slice(1497)), Digits(slice(1497, None))  # training, held-out


def loss(module: Any, batch: Any) -> dict[str, jaxdist.Mean]:
    logits, label, weight = module(batch["image"]), batch["label"], batch["weight"]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    means = {"loss": nats, "accuracy": (logits.argmax(-1) == label).astype(jnp.float32)}
    return {name: jaxdist.Mean((x * weight).sum(), weight.sum()) for name, x in means.items()}


CONFIG = {
    "model": {"type": "import", "path": Vit, "args": {"width": 32, "heads": 4, "layers": 4}},
    "loss": {"type": "import", "path": loss},
    "data": {"type": "import", "path": data, "classes": 10},
    "optim": {"type": "adamw", "learning_rate": 3e-3},
    "train": {"steps": 300, "batch_size": 64},
    "run": {"directory": "runs/own_vit"},
}

if __name__ == "__main__":
    found = jaxdist.fit(CONFIG, sys.argv[1:])
    print(f"held-out accuracy {found.heldout['accuracy']:.3f}")
