"""Slow weights, which follow the trained parameters (Lookahead).

Zhang et al., "Lookahead Optimizer: k steps forward, 1 step back" (arXiv 1907.08610), algorithm 1.
With momentum, the same algorithm is the outer step of SlowMo (Wang et al., arXiv 1910.00643,
algorithm 1) and of DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1) for one replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, model_validator

from jaxdist.config.schema import Config, Count
from jaxdist.optim.common import Beta
from jaxdist.train.state import Outer
from jaxdist.train.strategy.contract import RunSettings
from jaxdist.types import Leaf, OptState, Params


class Lookahead(Config):
    """A strategy that moves slow weights every `steps` steps, and continues training from them.

    The slow weights are the parameters from which these steps started. The negated change of the
    parameters over the steps is used as a gradient, and SGD updates the slow weights with this
    gradient. The parameters then become equal to the slow weights. The optimizer's state is not
    changed.
    """

    type: Literal["lookahead"] = "lookahead"
    """The name that selects this strategy in a config."""
    steps: Count = 5
    """The number of steps from one update of the slow weights to the next."""
    learning_rate: Annotated[float, Field(gt=0)] = 0.5
    """The learning rate of the slow weights. Without momentum, 0.5 keeps half of the change over
    the steps, and 1 keeps the whole change."""
    momentum: Beta = 0.0
    """The momentum of the SGD of the slow weights; 0 uses no momentum."""
    nesterov: bool = False
    """Whether to use Nesterov momentum for the slow weights."""

    @model_validator(mode="after")
    def _check(self) -> Lookahead:
        if self.nesterov and not self.momentum:
            raise ValueError(
                "nesterov has no effect without momentum: set momentum, or leave nesterov out"
            )
        return self

    def outer(self) -> Outer:
        sgd = optax.sgd(self.learning_rate, self.momentum or None, self.nesterov)
        return SlowWeights(self.steps, sgd)


def length_notices(strategy: Lookahead, given: RunSettings) -> tuple[str, ...]:
    """Return a notice if the length of the run is not a multiple of `strategy.steps`, else ()."""
    total_steps = given.total_steps
    left = total_steps % strategy.steps
    if not left:
        return ()
    if left == total_steps:
        return (
            f"strategy.type lookahead has no effect: the run ends after {total_steps} steps, "
            f"before the first {strategy.steps} (strategy.steps) are done; train longer, or set "
            "strategy.type: synchronous",
        )
    return (
        f"strategy.steps {strategy.steps}: the last {left} steps of the run do not change the slow "
        "weights, which evaluation uses; train for a multiple of strategy.steps",
    )


class SlowState(NamedTuple):
    """The slow weights, and the state of their optimizer."""

    params: Params
    optimizer: OptState


@dataclass(frozen=True)
class SlowWeights:
    """An exchange that moves slow weights by the parameters' change since the previous exchange.

    The exchange needs memory for a copy of the parameters and, with momentum, for a second copy.
    The copies are sharded like the optimizer's state.

    Attributes:
      every: the number of steps from one exchange to the next.
      optimizer: the optimizer of the slow weights.
    """

    every: int
    optimizer: optax.GradientTransformation

    def begin(self, params: Params) -> SlowState:
        # Without a copy, slow weights and parameters would share memory, which a step donates.
        copied = jax.tree.map(lambda p: jnp.array(p, copy=True), params)
        return SlowState(copied, self.optimizer.init(copied))

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def exchange(self, params: Params, carried: SlowState) -> tuple[Params, SlowState]:
        back = jax.tree.map(jnp.subtract, carried.params, params)
        updates, moved = self.optimizer.update(back, carried.optimizer, carried.params)
        slow = optax.apply_updates(carried.params, updates)
        return slow, SlowState(slow, moved)

    def evaluated(self, params: Params, carried: SlowState, step: Leaf) -> Params:
        """Return the slow weights, or `params` before the first exchange."""
        moved = step >= self.every
        return jax.tree.map(lambda slow, fast: jnp.where(moved, slow, fast), carried.params, params)
