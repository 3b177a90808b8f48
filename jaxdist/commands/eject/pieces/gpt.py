"""Model: a decoder (RMSNorm, rotary positions, SwiGLU), and the cross-entropy of next tokens.

Dims: B batch, L sequence, D embed, H heads, K key and value heads, d head size, F mlp, V tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.commands.eject.pieces.automatic import ROWS
from jaxdist.commands.eject.pieces.shares import PARAMS, whole

LAYERS = 2
EMBED = 128  # D
HEADS = 4  # H
KV_HEADS = 2  # K, each shared by H / K query heads
HEAD_SIZE = 32  # d
MLP = 384  # F
VOCAB = 257
PADDED_VOCAB = 320  # V, padded so that it divides over a mesh; padding has no probability
ROPE_THETA = 10000.0  # base of the frequencies of the rotary positions
ATTENTION_WINDOW = 64  #: window # earlier positions that each position attends to
SCAN_UNROLL = 2  #: unroll # layers in one iteration of the loop over them


def init_params(key: jax.Array) -> dict[str, Any]:
    """Return float32 parameters; the parameters of layers are stacked, [LAYERS, ...]."""
    embedding = 0.02 * jax.random.normal(jax.random.fold_in(key, 0), (VOCAB, EMBED))
    output = 0.02 * jax.random.normal(jax.random.fold_in(key, 3), (EMBED, VOCAB))  #: untied
    return {
        "embedding": jnp.pad(embedding, ((0, PADDED_VOCAB - VOCAB), (0, 0))),
        "blocks": jax.vmap(init_block)(jax.random.split(jax.random.fold_in(key, 1), LAYERS)),
        "norm": {"scale": jnp.ones(EMBED)},
        "output": jnp.pad(output, ((0, 0), (0, PADDED_VOCAB - VOCAB))),  #: untied
    }


def init_block(key: jax.Array) -> dict[str, Any]:
    """Return a layer's parameters; output kernels are small, as 2 LAYERS outputs are added up."""

    def draw(number: int, width: int, *shape: int) -> jax.Array:
        return width**-0.5 * jax.random.normal(jax.random.fold_in(key, number), shape)

    small = (2 * LAYERS) ** -0.5
    return {
        "attention_norm": {"scale": jnp.ones(EMBED)},
        "attention": {
            "query": draw(1, EMBED, EMBED, HEADS, HEAD_SIZE),
            "key": draw(2, EMBED, EMBED, KV_HEADS, HEAD_SIZE),
            "value": draw(3, EMBED, EMBED, KV_HEADS, HEAD_SIZE),
            "out": small * draw(4, EMBED, HEADS, HEAD_SIZE, EMBED),
        },
        "mlp_norm": {"scale": jnp.ones(EMBED)},
        "mlp": {
            "gate": draw(6, EMBED, EMBED, MLP),
            "up": draw(7, EMBED, EMBED, MLP),
            "down": small * draw(8, MLP, MLP, EMBED),
        },
    }


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Apply RMSNorm (arXiv 1910.07467)."""
    narrow, x = x.dtype, x.astype(jnp.float32)  #: narrow # squares lose too much in bfloat16
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale  #: narrow
    return y.astype(narrow)  #: narrow
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale  #: not narrow


def rotate(x_BLHd: jax.Array) -> jax.Array:
    """Apply rotary positions (arXiv 2104.09864); the halves of a head form the rotated pairs."""
    half = HEAD_SIZE // 2
    exponent = np.arange(half, dtype=np.float32) / np.float32(half)
    frequency = 1.0 / (ROPE_THETA ** exponent.astype(np.float64)).astype(np.float32)
    angle = np.arange(x_BLHd.shape[1], dtype=np.float32)[:, None] * frequency
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    left, right = jnp.split(x_BLHd, 2, axis=-1)  #: not narrow
    left, right = jnp.split(x_BLHd.astype(jnp.float32), 2, axis=-1)  #: narrow
    turned = [left * cos - right * sin, right * cos + left * sin]  #: narrow
    return jnp.concatenate(turned, -1).astype(x_BLHd.dtype)  #: narrow
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)  #: not narrow


@jax.checkpoint  #: remat # the backward pass recomputes each layer
def block(x_BLD: jax.Array, w: dict[str, Any]) -> tuple[jax.Array, None]:
    """Apply a layer, in the form that a scan takes: attention and MLP, each added to its input."""
    w = whole(w, PARAMS["blocks"], scanned=1)  #: ring3
    # Parameters are float32, for the optimizer; matrices are multiplied in bfloat16.  #: narrow
    narrow = jax.tree.map(lambda x: x.astype(x_BLD.dtype), (w["attention"], w["mlp"]))  #: narrow
    w = {**w, "attention": narrow[0], "mlp": narrow[1]}  #: narrow
    h_BLD = norm(x_BLD, w["attention_norm"]["scale"])
    q_BLHd = rotate(jnp.einsum("BLD,DHd->BLHd", h_BLD, w["attention"]["query"]))
    k_BLKd = rotate(jnp.einsum("BLD,DKd->BLKd", h_BLD, w["attention"]["key"]))
    v_BLKd = jnp.einsum("BLD,DKd->BLKd", h_BLD, w["attention"]["value"])
    y_BLHd = jax.nn.dot_product_attention(q_BLHd, k_BLKd, v_BLKd, is_causal=True)  #: not window
    y_BLHd = jax.nn.dot_product_attention(  #: window
        q_BLHd, k_BLKd, v_BLKd, is_causal=True, local_window_size=(ATTENTION_WINDOW, 0)
    )
    # Each device has a part of the heads, and below a part of F; XLA sums over `tensor`.  #: tensor
    x_BLD += jnp.einsum("BLHd,HdD->BLD", y_BLHd, w["attention"]["out"])
    x_BLD = jax.lax.with_sharding_constraint(x_BLD, ROWS)  #: tensor
    h_BLD = norm(x_BLD, w["mlp_norm"]["scale"])
    h_BLF = jax.nn.silu(h_BLD @ w["mlp"]["gate"]) * (h_BLD @ w["mlp"]["up"])
    x_BLD += h_BLF @ w["mlp"]["down"]
    return jax.lax.with_sharding_constraint(x_BLD, ROWS), None  #: tensor
    return x_BLD, None  #: not tensor


def nats(params: dict[str, Any], x_BLD: jax.Array, targets_BL: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of each example's next tokens, [B], from the last layer."""
    table = params["embedding"].T  #: not untied
    table = params["output"]  #: untied
    logits_BLV = norm(x_BLD, params["norm"]["scale"]) @ table  #: not narrow
    logits_BLV = norm(x_BLD, params["norm"]["scale"]) @ table.astype(x_BLD.dtype)  #: narrow
    # Padding is masked rather than cut off, so that V still divides over a mesh.
    hidden_V = jnp.where(jnp.arange(PADDED_VOCAB) < VOCAB, 0.0, -1e38)  #: narrow
    logits_BLV += jnp.where(jnp.arange(PADDED_VOCAB) < VOCAB, 0.0, -1e38)  #: not narrow
    logits_BLV += hidden_V.astype(x_BLD.dtype)  #: narrow
    logits_BLV = logits_BLV.astype(jnp.float32)  #: narrow # sums over V need its digits
    log_p_BL1 = jnp.take_along_axis(jax.nn.log_softmax(logits_BLV), targets_BL[..., None], -1)
    return -log_p_BL1.mean((1, 2))


def measure(params: dict[str, Any], batch: dict[str, jax.Array]) -> dict[str, Any]:  #: measured
    """Return the loss of each example, [B], in nats per token."""
    # Layers are gathered one by one, where they run; all else is gathered here.  #: ring3
    rest = {k: whole(w, PARAMS[k]) for k, w in params.items() if k != "blocks"}  #: ring3
    params = {**rest, "blocks": params["blocks"]}  #: ring3
    x_BLD = params["embedding"][batch["tokens"][:, :-1]]  #: not narrow
    x_BLD = params["embedding"][batch["tokens"][:, :-1]].astype(jnp.bfloat16)  #: narrow
    x_BLD, _ = jax.lax.scan(block, x_BLD, params["blocks"], unroll=SCAN_UNROLL)  #: unroll
    x_BLD, _ = jax.lax.scan(block, x_BLD, params["blocks"])  #: not unroll
    return {"loss": nats(params, x_BLD, batch["tokens"][:, 1:])}
