"""The state that steps change and checkpoints hold, and the contract for changes between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxdist.types import Buffers, Leaf, OptState, Params, PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state that training carries from step to step.

    Randomness and the position in the data are functions of (seed, step), and therefore not
    included.

    Attributes:
      step: the number of steps taken, int32.
      loss_scale: a `jaxdist.optim.loss_scale.LossScaleState`, or None without a loss scale.
      exchange: the state of the `jaxdist.parallel.contract.Exchange`, or () if it has no state.
      outer: the state of the `Outer` exchange, or () without such an exchange.
    """

    step: Leaf
    params: Params
    opt_state: OptState
    buffers: Buffers
    loss_scale: PyTree = None
    exchange: PyTree = ()
    outer: PyTree = ()


class Outer(Protocol):
    """An exchange of parameters that does not happen at every step.

    The state of the exchange (slow weights, outer momentum) is `TrainState.outer`. Leaves that
    belong to a parameter (`jaxdist.optim.owners`) are split over the mesh like the moments of this
    parameter; every device has a replica of each other leaf. All leaves are saved with the rest of
    the state, and every plan can load them without a changed bit. If the leaves in a checkpoint
    have another structure than the leaves of this exchange, another exchange saved the checkpoint,
    and this exchange begins again with the checkpoint's parameters.
    """

    def begin(self, params: Params) -> PyTree:
        """Return the exchange's state before the first step. The caller runs this under jit."""
        ...

    def due(self, step: int) -> bool:
        """Return whether to exchange after `step`; the result must be the same in all processes."""
        ...

    def exchange(self, params: Params, carried: Any) -> tuple[Any, Any]:
        """Return the parameters to continue with, and the next state of the exchange.

        The function is called under jit.

        Args:
          params: the parameters after the step.
          carried: the state of the exchange.
        """
        ...

    def evaluated(self, params: Params, carried: Any, step: Leaf) -> Params:
        """Return the parameters to evaluate after `step`. The caller runs this under jit.

        Args:
          params: the parameters after the step.
          carried: the state of the exchange.
          step: the number of steps taken, an int32 scalar.
        """
        ...
