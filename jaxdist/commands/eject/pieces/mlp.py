"""Model: a multilayer perceptron, and the cross-entropy of its classes."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.commands.eject.pieces.shares import PARAMS, whole

SIZES = (64, 512, 256, 10)  # pixels, hidden widths, classes
LABEL_SMOOTHING = 0.1  #: smoothing # fraction of the target that is spread over all classes


def init_params(key: jax.Array) -> list[Any]:
    """Return a float32 matrix and bias for each layer."""
    he_normal = jax.nn.initializers.he_normal()
    return [
        {
            # Only every second key is used, as in jaxdist, where biases have keys too.
            "kernel": he_normal(jax.random.fold_in(key, 2 * i), (width, SIZES[i + 1])),
            "bias": jnp.zeros(SIZES[i + 1]),
        }
        for i, width in enumerate(SIZES[:-1])
    ]


def forward(params: list[Any], image: jax.Array) -> jax.Array:
    """Map images uint8 [B, H, W, C] to logits [B, classes]."""
    x = image.reshape(len(image), -1).astype(jnp.float32) / 255
    *hidden, last = params  #: not ring3
    *hidden, last = map(whole, params, PARAMS)  #: ring3
    for layer in hidden:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ last["kernel"] + last["bias"]


def measure(params: list[Any], batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the loss in nats and the accuracy of each example, [B]."""
    logits, label = forward(params, batch["image"]), batch["label"]
    target = jax.nn.one_hot(label, SIZES[-1])
    target = (1 - LABEL_SMOOTHING) * target + LABEL_SMOOTHING / SIZES[-1]  #: smoothing
    return {
        "loss": -(target * jax.nn.log_softmax(logits)).sum(-1),
        "accuracy": (logits.argmax(-1) == label).astype(jnp.float32),
    }
