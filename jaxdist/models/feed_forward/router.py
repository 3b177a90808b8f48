"""The router of a mixture of experts: it selects the experts of each token, and their weights.

All statistics are sums over the tokens of a sequence, in which each token counts with its weight in
the loss. The statistics therefore add up over rows, microbatches and devices.

Dims: B batch, L sequence, E experts, k experts of a token, N layers with experts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.models.feed_forward.config import ExpertsConfig
from jaxdist.models.hints import Hint, no_hint

SUMS = ("balance_loss", "z_loss", "router_entropy", "dropped_tokens")
"""The names of the columns of `Statistics.sums`."""


class ExpertChoice(NamedTuple):
    """The experts that a router has selected for each token.

    Attributes:
      ids: the number of each selected expert, int32 `[B, L, k]`. If an expert drops the token, the
        entry is the number of experts instead.
      weights: the weight of each selected expert's result, float32 `[B, L, k]`, or 0 if the expert
        drops the token.
    """

    ids: jax.Array
    weights: jax.Array


class Statistics(NamedTuple):
    """The measurements of routers, summed over the tokens of each sequence, float32.

    Attributes:
      sums: a column for each name in `SUMS`, `[B, S]`, added up over layers.
      load: the total weight of the tokens that chose each expert, `[N, B, E]`. The layers are in
        order. For tokens of weight 1, the loads are whole numbers, whose sums are exact. The order
        of a sum therefore cannot decide whether a load is even, and in which direction a bias
        moves.
    """

    sums: jax.Array
    load: jax.Array

    @classmethod
    def zeros(cls, layers: int, rows: int, experts: int) -> Statistics:
        """Return the statistics before the first layer, which are zeros."""
        shapes = (rows, len(SUMS)), (layers, rows, experts)
        return cls(*(jnp.zeros(shape, jnp.float32) for shape in shapes))

    def add(self, sums_BS: jax.Array, load_BE: jax.Array) -> Statistics:
        """Return the statistics, to which the sums and the loads of the next layer are added."""
        load_NBE = jnp.concatenate([self.load[1:], load_BE[None]])
        return Statistics(self.sums + sums_BS, load_NBE)


def route(
    logits_BLE: jax.Array,
    bias_E: jax.Array,
    weight_BL: jax.Array,
    config: ExpertsConfig,
    positions_1L: jax.Array | None = None,
    hint: Hint = no_hint,
) -> tuple[ExpertChoice, jax.Array, jax.Array]:
    """Select the experts of each token.

    If two experts have equal scores, the expert with the smaller number comes first. If more tokens
    of a sequence choose an expert than the expert's capacity, the expert drops the later tokens of
    the sequence. The dropped tokens therefore do not depend on the mesh or on microbatches.

    Args:
      logits_BLE: the router's logits, float32.
      bias_E: a bias of the scores that only affects the selection, and not the weights.
      weight_BL: the weight of each token in the loss.
      positions_1L: the position of each token in its sequence, or None for 0..L-1.
      hint: the layout of activations on the mesh.

    Returns:
      The choice, and what this layer adds to the sums (`sums_BS`) and to the load (`load_BE`) of
      `Statistics`.
    """
    k, E = config.top_k, config.count
    soft_BLE = jax.nn.softmax(logits_BLE, -1)
    score_BLE = soft_BLE if config.router == "softmax" else jax.nn.sigmoid(logits_BLE)
    # The sums of scores and bias only select experts. Gradients reach the scores through the
    # weights below, and never reach the bias.
    ranked_BLE = jax.lax.stop_gradient(score_BLE + bias_E.reshape(1, 1, E))
    ids_BLk = jax.lax.top_k(ranked_BLE, k)[1]
    # XLA's partitioner aborts at a gather from scores that two axes split, if another axis is
    # manual.
    chosen_BLkE = ids_BLk[..., None] == jnp.arange(E).reshape(1, 1, 1, E)
    weights_BLk = jnp.where(chosen_BLkE, score_BLE[:, :, None], 0).sum(-1)
    if config.normalize:
        weights_BLk = weights_BLk / (weights_BLk.sum(-1, keepdims=True) + 1e-20)
    weights_BLk = weights_BLk * config.scale
    chosen_BLE = chosen_BLkE.sum(-2)
    load_BE = (chosen_BLE * weight_BL[..., None]).sum(1)
    dropped_BL = jnp.zeros_like(weight_BL)
    capacity = config.capacity(logits_BLE.shape[1])
    if capacity is not None:
        before_BLE = _sum_before(chosen_BLE, positions_1L, hint)
        fits_BLk = jnp.where(chosen_BLkE, before_BLE[:, :, None], 0).sum(-1) < capacity
        dropped_BL = 1 - fits_BLk.mean(-1)
        ids_BLk = jnp.where(fits_BLk, ids_BLk, E)
        weights_BLk = jnp.where(fits_BLk, weights_BLk, 0)
    share_BLE = soft_BLE
    if config.router == "sigmoid":
        share_BLE = score_BLE / (score_BLE.sum(-1, keepdims=True) + 1e-20)
    sums = (
        _balance(load_BE / k, share_BLE, weight_BL),
        (jax.nn.logsumexp(logits_BLE, -1) ** 2 * weight_BL).sum(1),
        (-(share_BLE * jnp.log(share_BLE + 1e-20)).sum(-1) * weight_BL).sum(1),
        (dropped_BL * weight_BL).sum(1),
    )
    return ExpertChoice(ids_BLk, weights_BLk), jnp.stack(sums, -1), load_BE


def _sum_before(
    x_BLE: jax.Array, positions_1L: jax.Array | None, hint: Hint = no_hint
) -> jax.Array:
    """Return, for each token, the sum of x over the earlier positions of the token's sequence.

    >>> _sum_before(jnp.array([[[1], [2], [4]]]), jnp.array([[2, 0, 1]])).ravel().tolist()
    [6, 0, 2]
    """
    if positions_1L is None:
        return jnp.cumsum(x_BLE, 1) - x_BLE
    # With this hint, devices have whole sequences. XLA's partitioner aborts at a gather from an
    # array that two axes split (see `route`).
    moved_BLE = hint(x_BLE, "batch", None, None)[:, jnp.argsort(positions_1L[0])]
    before_BLE = hint(jnp.cumsum(moved_BLE, 1) - moved_BLE, "batch", None, None)
    return before_BLE[:, positions_1L[0]]


def _balance(load_BE: jax.Array, share_BLE: jax.Array, weight_BL: jax.Array) -> jax.Array:
    """Return Switch's loss of each sequence, E sum_i f_i P_i, times the sequence's weight.

    E is the number of experts. f_i is the fraction of the choices of the sequence's tokens that are
    for expert i, and P_i is the mean over tokens of the probability of expert i. An even load gives
    1 (Fedus et al., arXiv 2101.03961, section 2.2).
    """
    weight_B = weight_BL.sum(1)
    divisor_B = jnp.where(weight_B == 0, 1, weight_B)
    mean_BE = (share_BLE * weight_BL[..., None]).sum(1) / divisor_B[:, None]
    # The fractions f_i count discrete choices, so only the probabilities P_i have a gradient.
    return load_BE.shape[-1] * (jax.lax.stop_gradient(load_BE) * mean_BE).sum(-1)


def corrected(bias_NE: jax.Array, load_NE: jax.Array, rate: float) -> jax.Array:
    """Return the biases after each has moved by `rate` towards an even load (arXiv 2408.15664).

    >>> corrected(jnp.zeros(3), jnp.array([3.0, 1.0, 2.0]), 0.5).tolist()
    [-0.5, 0.5, 0.0]
    """
    return bias_NE + rate * jnp.sign(load_NE.mean(-1, keepdims=True) - load_NE)


def violation(load: jax.Array) -> jax.Array:
    """Return MaxVio over the last dim: the largest load divided by the mean load, minus 1.

    >>> float(violation(jnp.array([3.0, 1.0, 2.0])))
    0.5
    """
    mean = load.mean(-1)
    return jnp.where(mean == 0, 0.0, load.max(-1) / jnp.where(mean == 0, 1, mean) - 1)
