"""All that a step changes and a checkpoint must hold, and what may change it between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax

from jaxdist.types import Buffers, Leaf, OptState, Params, PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What training carries from step to step.

    Randomness and data position are functions of (seed, step), so they need no place here.

    Attributes:
      step: steps taken, int32.
      loss_scale: `jaxdist.optim.loss_scale.LossScaleState`, or None.
      exchange: of `jaxdist.parallel.contract.Exchange`; () where it carries none.
      outer: of `Outer`; () where it carries none.
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

    Local updates (DiLoCo, elastic averaging) and parameter servers let replicas go their own way
    for some steps and then exchange parameters; such a way is one more implementation of this.
    What it carries (outer momentum, say) is `TrainState.outer`: saved and restored with the rest.
    """

    def begin(self, state: TrainState) -> PyTree:
        """What it carries before the first step; `state` has none yet."""
        ...

    def shardings(self, carried: PyTree) -> PyTree:
        """Where the leaves of what it carries lie; `carried` may be shapes."""
        ...

    def due(self, step: int) -> bool:
        """Whether to exchange after `step`; the same on every process."""
        ...

    def exchange(self, step: int, state: TrainState) -> TrainState:
        """The state that training goes on with after `step`."""
        ...
