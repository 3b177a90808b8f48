"""Train a model and a loss of your own, written in flax linen, with a config of jaxdist.

    python examples/own_model.py                          # on all devices
    python examples/own_model.py parallel.zero.stage=3    # with any setting of a config

The program prints the progress of `jaxdist train`, then the held-out accuracy, about 0.97.
Checkpoints and metrics are in runs/own_model. For a model of equinox, use `jaxdist.from_equinox`
in place of `jaxdist.from_linen`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxdist


class Net(nn.Module):
    """Two layers with dropout between them, which jaxdist turns off when it evaluates."""

    width: int

    @nn.compact
    def __call__(self, image: jax.Array, train: bool) -> jax.Array:
        x = image.reshape(len(image), -1).astype(jnp.float32) / 255
        x = nn.relu(nn.Dense(self.width)(x))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(10)(x)


def model(rngs: Any, width: int) -> Any:
    """Return the model for jaxdist; an example batch, with any number of rows, gives its shapes."""
    return jaxdist.from_linen(Net(width), jnp.zeros((1, 8, 8, 1), jnp.uint8))(rngs)


def loss(module: Any, batch: Mapping[str, jax.Array]) -> dict[str, jaxdist.Mean]:
    """Return sums with their weights, which add up over all devices and microbatches."""
    logits, label, weight = module(batch["image"]), batch["label"], batch["weight"]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    hits = (logits.argmax(-1) == label).astype(jnp.float32)
    return {
        "loss": jaxdist.Mean((nats * weight).sum(), weight.sum()),
        "accuracy": jaxdist.Mean((hits * weight).sum(), weight.sum()),
    }


CONFIG = {
    "model": {"type": "import", "path": model, "args": {"width": 256}},
    "loss": {"type": "import", "path": loss},
    "data": {"type": "images", "source": "digits"},
    "optim": {"type": "adamw", "learning_rate": 3e-3},
    "train": {"steps": 400, "batch_size": 64},
    "run": {"directory": "runs/own_model"},
}


def main(overrides: list[str]) -> dict[str, float]:
    """Train, and return the held-out means."""
    found = jaxdist.fit(CONFIG, overrides)
    print(f"held-out accuracy {found.heldout['accuracy']:.3f}")
    return dict(found.heldout)


if __name__ == "__main__":
    main(sys.argv[1:])
