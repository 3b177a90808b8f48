"""A stack of blocks with routers, which returns the statistics and auxiliary losses of routers.

Dims: B batch, L sequence, D embed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.models.feed_forward.config import ExpertsConfig
from jaxdist.models.feed_forward.measure import Auxiliary, Settle, auxiliary, moved_biases
from jaxdist.models.feed_forward.router import Statistics
from jaxdist.models.layers import Stacked, scan_blocks

Routed = tuple[jax.Array, Statistics]
"""The residual stream, with the statistics of the routers of the earlier blocks."""


class RoutedStack(Stacked):
    """A `Stacked` whose blocks may have experts; blocks with experts map `Routed` to `Routed`.

    Attributes:
      experts: the settings of the experts, or None if the blocks are blocks of a plain `Stacked`.
      routers: the number of blocks with experts in the whole model. A chunk of a pipeline has only
        some of these blocks.
      deterministic: whether the model evaluates; the loss then excludes auxiliary losses.
    """

    experts: ExpertsConfig | None = None
    routers: int = 0
    # `nnx.Module.eval` and `nnx.Module.train` set this attribute by its name.
    deterministic: bool = False

    def trunk(self, x: jax.Array, *inputs: Any) -> jax.Array:
        """Run all blocks in order, without the statistics of routers."""
        if self.experts is None:
            return super().trunk(x, *inputs)
        unweighted = jnp.zeros(x.shape[:2], jnp.float32)
        return self.routed_trunk(self._begun(self.experts, x), unweighted, *inputs)[0]

    def routed_embed(self, weight_BL: jax.Array, *inputs: Any) -> Routed:
        """Return the embedding, with the statistics before the first router.

        Args:
          weight_BL: the weight of each token, which is not used.
          inputs: the inputs of the model.
        """
        assert self.experts is not None
        model: Any = self
        return self._begun(self.experts, model.embed(*inputs))

    def routed_trunk(self, carried: Routed, weight_BL: jax.Array, *inputs: Any) -> Routed:
        """Run all blocks of this module in order; in a pipeline, these are the blocks of a chunk.

        Args:
          carried: the residual stream, with the statistics of the routers before these blocks.
          weight_BL: the weight of each token in the statistics.
          inputs: the inputs of the model.
        """
        more = *self.operands(*inputs), weight_BL
        return scan_blocks(self.blocks, carried, *more, remat=self.remat, unroll=self.unroll)

    def _begun(self, experts: ExpertsConfig, x_BLD: jax.Array) -> Routed:
        return x_BLD, Statistics.zeros(self.routers, len(x_BLD), experts.count)

    def measured(self, weight_BL: jax.Array, *inputs: Any) -> tuple[jax.Array, Auxiliary | None]:
        """Return the input of the head, and the auxiliary losses, which are None without experts.

        Args:
          weight_BL: the weight of each token in the loss and in the auxiliary losses.
          inputs: the inputs of the model.
        """
        if self.experts is None:
            return self.hidden(*inputs), None
        begun = self.routed_embed(weight_BL, *inputs)
        x_BLD, statistics = self.routed_trunk(begun, weight_BL, *inputs)
        return x_BLD, auxiliary(statistics, weight_BL, self.experts)

    def settling(self) -> Settle | None:
        """Return the function that moves the biases of routers after a step.

        The result is None if the routers have no biases.
        """
        if self.experts is None or not self.experts.bias_rate:
            return None
        return partial(moved_biases, rate=self.experts.bias_rate)
