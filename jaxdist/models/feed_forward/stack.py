"""A stack of blocks with routers, whose statistics are returned and whose losses are added.

Dims: B batch, L sequence, D embed.
"""

from __future__ import annotations

from collections.abc import Sequence
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
      experts: the settings of the experts, or None if the blocks are those of a plain `Stacked`.
      deterministic: whether the model evaluates; the loss then excludes auxiliary losses.
    """

    experts: ExpertsConfig | None = None
    # `nnx.Module.eval` and `nnx.Module.train` set this attribute by its name.
    deterministic: bool = False

    def trunk(self, x: jax.Array, *inputs: Any) -> jax.Array:
        """Run all blocks in order, without the statistics of routers."""
        if self.experts is None:
            return super().trunk(x, *inputs)
        return self._routed(self.experts, x, inputs, jnp.zeros(x.shape[:2], jnp.float32))[0]

    def _routed(
        self, experts: ExpertsConfig, x_BLD: jax.Array, inputs: Sequence[Any], weight_BL: jax.Array
    ) -> Routed:
        layers = len(jax.tree.leaves(self.blocks)[0])
        begun = x_BLD, Statistics.zeros(layers, len(x_BLD), experts.count)
        more = *self.operands(*inputs), weight_BL
        return scan_blocks(self.blocks, begun, *more, remat=self.remat, unroll=self.unroll)

    def measured(self, weight_BL: jax.Array, *inputs: Any) -> tuple[jax.Array, Auxiliary | None]:
        """Return the input of the head, and the auxiliary losses, which are None without experts.

        Args:
          weight_BL: the weight of each token in the loss and in the auxiliary losses.
          inputs: the inputs of the model.
        """
        if self.experts is None:
            return self.hidden(*inputs), None
        model: Any = self
        x_BLD, statistics = self._routed(self.experts, model.embed(*inputs), inputs, weight_BL)
        return x_BLD, auxiliary(statistics, weight_BL, self.experts)

    def settling(self) -> Settle | None:
        """Return the function that moves routers' biases after a step, or None without biases."""
        if self.experts is None or not self.experts.bias_rate:
            return None
        return partial(moved_biases, rate=self.experts.bias_rate)
