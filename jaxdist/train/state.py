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
      step: number of steps taken, int32.
      loss_scale: `jaxdist.optim.loss_scale.LossScaleState`, or None.
      exchange: state of `jaxdist.parallel.contract.Exchange`, or () if that has no state.
      outer: state of `Outer`, or () without an exchange between steps.
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
    belong to a parameter (`jaxdist.optim.owners`) are split over the mesh like that parameter's
    moments, in shards with ZeRO; all other leaves are whole on every device. All leaves are saved
    with the rest of the state, and every plan can load them without a changed bit. If the leaves of
    a checkpoint differ, another exchange saved it, and this exchange begins again with the
    parameters of the checkpoint.
    """

    def begin(self, params: Params) -> PyTree:
        """Return the exchange's state before the first step; called under jit."""
        ...

    def due(self, step: int) -> bool:
        """Return whether to exchange after `step`; all processes must return the same."""
        ...

    def exchange(self, params: Params, carried: Any) -> tuple[Any, Any]:
        """Return the parameters to continue with, and the next state; called under jit."""
        ...

    def evaluated(self, params: Params, carried: Any, step: Leaf) -> Params:
        """Return the parameters to evaluate after `step`, an int32 scalar; called under jit."""
        ...
