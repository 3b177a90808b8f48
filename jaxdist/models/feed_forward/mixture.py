"""A mixture of experts: a router, experts, and experts that see every token.

Dims: B batch, L sequence, D embed, F hidden width of an expert, E experts, k experts of a token,
T tokens of a device, R rows. A token has k *copies*, one for each of its experts. The rows are the
copies of the T tokens, sorted by expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.models.feed_forward.config import ExpertsConfig
from jaxdist.models.feed_forward.products import Product, choose_product
from jaxdist.models.feed_forward.router import ExpertChoice, Statistics, route
from jaxdist.models.feed_forward.swiglu import ACTIVATIONS, GATED, Mlp, MlpSettings, SwiGLU
from jaxdist.models.hints import RESIDUAL, WITHIN, Hint
from jaxdist.models.layers import param
from jaxdist.models.remat import named
from jaxdist.permute import collected, spread

INTO, OUT = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")
"""The dims of an expert's input kernels (gate and up), and of its output kernel (down)."""


class RouterBias(nnx.Variable):
    """A bias that only selects experts: state that no gradient reaches."""


@dataclass(frozen=True)
class Experts:
    """The experts that a device has, as a function of tokens and of the experts of each token.

    Attributes:
      kind: the type of MLP of each expert.
      product: the method to multiply rows by the kernels of their experts.
    """

    kind: Mlp
    product: Product

    def __call__(
        self, x_TD: jax.Array, ids_Tk: jax.Array, weights_Tk: jax.Array, *kernels: jax.Array
    ) -> jax.Array:
        """Return the weighted sum of the results of each token's experts, `[T, D]`.

        Args:
          ids_Tk: the numbers of each token's experts. This device has the experts 0 to E - 1. A
            number of E or more means that another device has the expert, or that the expert drops
            the token.
          weights_Tk: the weight of each result.
          kernels: the kernels gate (if any) and up, `[E, D, F]`, and down, `[E, F, D]`.
        """
        *into, down_EFD = kernels
        index_R, places_Tk, counts_E, block = self._sorted(ids_Tk, len(down_EFD))
        token_R = index_R // ids_Tk.shape[1]
        names = ("mlp_gate", "mlp_up")[-len(into) :]
        # Each product gathers its rows separately. XLA still runs equal gathers once, and in the
        # backward pass it adds gradients of tokens, which are shorter than gradients of rows. A row
        # of padding may contain any token, since it has no weight.
        first_RF, *more = (
            named(self.product(spread(x_TD, token_R, places_Tk, True), w, counts_E, block), name)
            for w, name in zip(into, names, strict=True)
        )
        hidden_RF = ACTIVATIONS[self.kind](first_RF)
        if more:
            hidden_RF = hidden_RF * more[0]
        # The hidden values are weighted, because a row of them is shorter than a row of results.
        weight_R: jax.Array = spread(weights_Tk.reshape(-1), index_R, places_Tk.reshape(-1, 1))
        weighted_RF = (hidden_RF * weight_R[:, None]).astype(x_TD.dtype)
        y_RD = self.product(weighted_RF, down_EFD, counts_E, block)
        return collected(y_RD, places_Tk, token_R, True)

    def _sorted(
        self, ids_Tk: jax.Array, experts: int
    ) -> tuple[jax.Array, jax.Array, jax.Array, int]:
        """Assign a row to each copy of a token, sorted by expert and then by token.

        A token has a copy for each of its k experts. The rows of each expert are padded to whole
        blocks.

        Returns:
          Four values: the copy in each row (or the number of copies in a row of padding); the row
          of each copy (or the number of rows if the copy's expert is not on this device); the
          number of rows of each expert, with padding; and the number of rows in a block.
        """
        tokens, k = ids_Tk.shape
        # The k copies of a token are for different experts, so each expert gets at most one copy.
        most = tokens * min(k, experts)
        block = self.product.block(most, experts)
        # The last block of each expert has at most block - 1 rows of padding.
        rows = -(-(most + experts * (block - 1)) // block) * block
        copies = tokens * k
        # The copies for other devices count as copies for one more expert, which comes last.
        ids = jnp.minimum(ids_Tk.reshape(-1), experts)
        counts = jnp.bincount(ids, length=experts + 1)
        padded_E = -(-counts[:experts] // block) * block
        first = jnp.cumsum(counts) - counts
        order = jnp.argsort(ids, stable=True)
        rank = jnp.zeros(copies, jnp.int32).at[order].set(jnp.arange(copies, dtype=jnp.int32))
        begin = jnp.append(jnp.cumsum(padded_E) - padded_E, rows)
        places = jnp.where(ids < experts, begin[ids] + rank - first[ids], rows)
        index_R = (
            jnp.full(rows, copies, jnp.int32)
            .at[places]
            .set(jnp.arange(copies, dtype=jnp.int32), mode="drop")
        )
        return index_R, places.reshape(tokens, k), padded_E.astype(jnp.int32), block


class Mixture(nnx.Module):
    """A feed-forward layer of experts (Shazeer et al., arXiv 1701.06538)."""

    def __init__(
        self,
        config: MlpSettings,
        experts: ExpertsConfig,
        rngs: nnx.Rngs,
        hint: Hint,
        platform: str | None,
    ):
        D, F, E = config.embed, experts.mlp or config.mlp_width, experts.count
        init = nnx.initializers.normal(D**-0.5)
        down = nnx.initializers.normal(F**-0.5 / (2 * config.layers) ** 0.5)
        self.router = param(rngs, init, (D, E), ("embed", None))
        if experts.bias_rate:
            self.router_bias = RouterBias(jnp.zeros(E, jnp.float32))
        self.gated = config.mlp_type in GATED
        if self.gated:
            self.gate = param(rngs, init, (E, D, F), INTO)
        self.up = param(rngs, init, (E, D, F), INTO)
        self.down = param(rngs, down, (E, F, D), OUT)
        if experts.shared:
            self.shared = SwiGLU(config, rngs, hint, width=experts.shared * F)
        self.experts, self.hint = experts, hint
        self.compute = Experts(config.mlp_type, choose_product(experts.product, platform, D, F))

    def __call__(
        self,
        x_BLD: jax.Array,
        weight_BL: jax.Array,
        statistics: Statistics,
        positions_1L: jax.Array | None = None,
    ) -> tuple[jax.Array, Statistics]:
        """Map x `[B, L, D]`, laid out as the residual stream, to the same shape and layout.

        Args:
          weight_BL: the weight of each token in the loss and in the statistics.
          statistics: the statistics of the earlier layers, to which this layer adds its statistics.
          positions_1L: the position of each token in its sequence, or None for 0..L-1.
        """
        shared_BLD = self.shared(x_BLD) if self.experts.shared else None
        x_BLD = self.hint(x_BLD, *WITHIN, was=RESIDUAL)
        # In bfloat16, different logits would often be equal, and rounding would decide which
        # experts are selected.
        logits_BLE = jnp.matmul(
            x_BLD.astype(jnp.float32), self.router[...], precision=jax.lax.Precision.HIGHEST
        )
        logits_BLE = self.hint(logits_BLE, "batch", "seq", None)
        bias_E = self.router_bias[...] if self.experts.bias_rate else jnp.zeros(self.experts.count)
        choice, sums_BS, load_BE = route(
            logits_BLE, bias_E, weight_BL, self.experts, positions_1L, self.hint
        )
        y_BLD = self._mixed(x_BLD, choice)
        y_BLD = self.hint(y_BLD, *RESIDUAL, was=WITHIN)
        if shared_BLD is not None:
            y_BLD = y_BLD + shared_BLD
        return y_BLD, statistics.add(sums_BS, load_BE)

    def _mixed(self, x_BLD: jax.Array, choice: ExpertChoice) -> jax.Array:
        """Return the weighted sum of the results of each token's experts."""
        into = [self.gate[...], self.up[...]] if self.gated else [self.up[...]]
        kernels = {INTO: into, OUT: [self.down[...]]}
        pairs = [(dims, w.astype(x_BLD.dtype)) for dims, ws in kernels.items() for w in ws]
        return self.hint.over_experts(
            self.compute,
            x_BLD,
            choice.ids,
            choice.weights,
            *pairs,
            capacity=self.experts.capacity(x_BLD.shape[1]),
        )
