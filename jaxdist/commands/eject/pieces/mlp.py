"""Model: a multilayer perceptron, and the cross-entropy of its classes."""

from typing import Any

import jax
import jax.numpy as jnp

SIZES = (64, 512, 256, 10)  # pixels, hidden widths, classes
LABEL_SMOOTHING = 0.1  #: smoothing # share of the target that is spread over all classes


def init_params(key: jax.Array) -> list[Any]:
    """A matrix and a bias for each layer, float32."""
    he_normal = jax.nn.initializers.he_normal()
    return [
        {
            # Every second key of the seed's: the biases' own are not used.
            "kernel": he_normal(jax.random.fold_in(key, 2 * i), (width, SIZES[i + 1])),
            "bias": jnp.zeros(SIZES[i + 1]),
        }
        for i, width in enumerate(SIZES[:-1])
    ]


def forward(params: list[Any], image: jax.Array) -> jax.Array:
    """Images uint8 [B, H, W, C] to logits [B, classes]."""
    x = image.reshape(len(image), -1).astype(jnp.float32) / 255
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ params[-1]["kernel"] + params[-1]["bias"]


def measure(params: list[Any], batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Loss in nats and accuracy of each example, [B]."""
    logits, label = forward(params, batch["image"]), batch["label"]
    target = jax.nn.one_hot(label, SIZES[-1])
    target = (1 - LABEL_SMOOTHING) * target + LABEL_SMOOTHING / SIZES[-1]  #: smoothing
    return {
        "loss": -(target * jax.nn.log_softmax(logits)).sum(-1),
        "accuracy": (logits.argmax(-1) == label).astype(jnp.float32),
    }
