"""Model: a small convolutional network, and the cross-entropy of its classes."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.commands.eject.pieces.shares import PARAMS, whole

CHANNELS = (1, 32, 64)  # channels of an image, and of each convolution
WIDTHS = (256, 128, 10)  # features after the convolutions, hidden width, classes
LABEL_SMOOTHING = 0.1  #: smoothing # fraction of the target that is spread over all classes


def init_params(key: jax.Array) -> dict[str, Any]:
    """Return a float32 kernel and bias for each layer."""

    def layer(number: int, init: Any, *shape: int) -> dict[str, jax.Array]:
        # Only every second key is used, as in jaxdist, where biases have keys too.
        kernel = init(jax.random.fold_in(key, 2 * number), shape)
        return {"kernel": kernel, "bias": jnp.zeros(shape[-1])}

    he, lecun = jax.nn.initializers.he_normal(), jax.nn.initializers.lecun_normal()
    pairs = [*itertools.pairwise(CHANNELS)]
    return {
        "convolutions": [layer(i, he, 3, 3, *pair) for i, pair in enumerate(pairs)],
        "hidden": layer(len(pairs), he, *WIDTHS[:2]),
        "output": layer(len(pairs) + 1, lecun, *WIDTHS[1:]),
    }


def forward(params: dict[str, Any], image: jax.Array) -> jax.Array:
    """Map images uint8 [B, H, W, C] to logits [B, classes]."""
    x, dims = image.astype(jnp.float32) / 255, ("NHWC", "HWIO", "NHWC")
    convolutions = params["convolutions"]  #: not ring3
    convolutions = map(whole, params["convolutions"], PARAMS["convolutions"])  #: ring3
    for layer in convolutions:
        x = jax.lax.conv_general_dilated(x, layer["kernel"], (1, 1), "SAME", dimension_numbers=dims)
        x = jax.nn.relu(x + layer["bias"])
        if (
            min(x.shape[1:3]) > 1
        ):  # the maximum of 2 x 2 pixels; an odd row or column at the end is dropped
            h, w = x.shape[1] // 2, x.shape[2] // 2
            x = x[:, : 2 * h, : 2 * w].reshape(len(x), h, 2, w, 2, -1).max((2, 4))
    hidden, output = params["hidden"], params["output"]  #: not ring3
    hidden, output = (whole(params[name], PARAMS[name]) for name in ("hidden", "output"))  #: ring3
    x = x.reshape(len(x), -1) @ hidden["kernel"] + hidden["bias"]
    return jax.nn.relu(x) @ output["kernel"] + output["bias"]


def measure(params: dict[str, Any], batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the loss in nats and the accuracy of each example, [B]."""
    logits, label = forward(params, batch["image"]), batch["label"]
    target = jax.nn.one_hot(label, WIDTHS[-1])
    target = (1 - LABEL_SMOOTHING) * target + LABEL_SMOOTHING / WIDTHS[-1]  #: smoothing
    return {
        "loss": -(target * jax.nn.log_softmax(logits)).sum(-1),
        "accuracy": (logits.argmax(-1) == label).astype(jnp.float32),
    }
