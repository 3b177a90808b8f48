"""All that a step changes and a checkpoint must hold, and what may change it between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

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

    What it carries (slow weights, outer momentum) is `TrainState.outer`. Its leaves that belong to
    a parameter (`jaxdist.optim.owners`) lie on the mesh as that parameter's moments do, in shards
    with ZeRO; all others lie whole on every device. They are saved with the rest and load into any
    plan, to the bit. Where a checkpoint has other leaves, another one saved it, and it begins anew
    with the parameters of the checkpoint.
    """

    def begin(self, params: Params) -> PyTree:
        """What it carries before the first step; traced."""
        ...

    def due(self, step: int) -> bool:
        """Whether to exchange after `step`; the same on every process."""
        ...

    def exchange(self, params: Params, carried: Any) -> tuple[Any, Any]:
        """The parameters that training goes on with, and what is carried on; traced."""
        ...

    def evaluated(self, params: Params, carried: Any, step: Leaf) -> Params:
        """The parameters to evaluate after `step`, an int32 scalar; traced."""
        ...
