"""All that a step changes, and all that a checkpoint must hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What training carries from step to step.

    Randomness and data position are functions of (seed, step), so they need no place here.

    Attributes:
      step: steps taken, int32.
      loss_scale: `jaxdist.optim.loss_scale.LossScaleState`, or None.
      exchange: of `jaxdist.parallel.contract.Exchange`; () where it carries none.
      outer: of `jaxdist.train.outer.Outer`; () where it carries none.
    """

    step: Any
    params: Any
    opt_state: Any
    buffers: Any
    loss_scale: Any = None
    exchange: Any = ()
    outer: Any = ()
