"""All that a step changes, and all that a checkpoint must hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Parameters, optimizer state, buffers, the number of steps taken, the state of a loss scale.

    Randomness and data position are functions of (seed, step), so they need no place here.
    """

    step: Any
    params: Any
    opt_state: Any
    buffers: Any
    loss_scale: Any = None
