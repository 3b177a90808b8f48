"""A train step written by hand, the reference of `jaxdist bench overhead`.

Nothing of jaxdist is used here. The step computes what jaxdist's models compute at their defaults,
without options. Dims: B batch, L sequence, D embed, H heads, d head_dim, F mlp, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax

from jaxdist.types import OptState, Params, Shardings

Batch = Mapping[str, jax.Array]
State = tuple[Params, OptState]


def plain_step(
    loss: Callable[[Params, Batch], jax.Array],
    optimizer: optax.GradientTransformation,
    shardings: Shardings,
) -> Callable[[State, Batch], tuple[State, jax.Array]]:
    """Return a jitted train step, which donates its state.

    The step maps a state (params, opt_state) and a batch to the new state, and to the loss and the
    norm of the gradients (float32 `[2]`).

    Args:
      loss: the mean loss over the batch.
      shardings: the shardings of the state, as in `out_shardings` of `jax.jit`.
    """

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        new = (optax.apply_updates(params, updates), opt_state)
        return new, jnp.stack([value, optax.tree.norm(grads)])

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def mlp_loss(params: Params, batch: Batch) -> jax.Array:
    """Return the mean cross-entropy of a ReLU network on images of bytes."""
    x = batch["image"].reshape(batch["image"].shape[0], -1).astype(jnp.float32) / 255
    layers = [params["layers"][str(i)] for i in range(len(params["layers"]))]
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"][None])
    logits = x @ layers[-1]["kernel"] + layers[-1]["bias"][None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def gpt_loss(params: Params, batch: Batch, *, vocab_size: int = 257) -> jax.Array:
    """Return the mean cross-entropy of each next token, with the head tied to the embedding.

    The table is padded beyond `vocab_size`, as in jaxdist; the padding has probability 0.
    """
    tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    x_BLD = params["embedding"][tokens]
    x_BLD, _ = jax.lax.scan(lambda x, layer: (_block(layer, x), None), x_BLD, params["blocks"])
    logits = _matmul(_norm(params["norm"], x_BLD), params["embedding"].T)
    padding_V = jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, 0.0, -1e30)
    logits += padding_V[None, None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def _block(layer: Params, x_BLD: jax.Array) -> jax.Array:
    attention, mlp = layer["attention"], layer["mlp"]
    h_BLD = _norm(layer["attention_norm"], x_BLD)
    q, k, v = (_matmul(h_BLD, attention[name]) for name in ("query", "key", "value"))
    y_BLHd = jax.nn.dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
    B, L, D = x_BLD.shape
    x_BLD = x_BLD + _matmul(y_BLHd.reshape(B, L, D), attention["out"].reshape(D, D))
    h_BLD = _norm(layer["mlp_norm"], x_BLD)
    gated_BLF = jax.nn.silu(_matmul(h_BLD, mlp["gate"])) * _matmul(h_BLD, mlp["up"])
    return x_BLD + _matmul(gated_BLF, mlp["down"])


def _norm(norm: Params, x: jax.Array) -> jax.Array:
    mean_square = jnp.mean(x**2, -1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + 1e-6) * norm["scale"][None, None]


def _matmul(x_BLD: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiply with flattened rows, as jaxdist's models do, so that only the step differs."""
    rows = x_BLD.reshape(-1, x_BLD.shape[-1]) @ kernel.reshape(kernel.shape[0], -1)
    return rows.reshape(*x_BLD.shape[:-1], *kernel.shape[1:])


def _rotate(x_BLHd: jax.Array) -> jax.Array:
    half = x_BLHd.shape[-1] // 2
    angle = jnp.arange(x_BLHd.shape[1])[:, None] * 1e4 ** (-jnp.arange(half) / half)[None]
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    a, b = x_BLHd[..., :half], x_BLHd[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
