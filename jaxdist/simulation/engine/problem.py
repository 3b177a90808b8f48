"""The interfaces of a simulation's problem and update rule, with numpy arrays; and plain SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from jaxdist.param_server.contract import Arrays, RuleState


class Computed(NamedTuple):
    """A gradient that a worker has computed.

    Attributes:
      tokens: the weight of the gradient in a mean.
    """

    gradient: Arrays
    tokens: float = 1.0


class TrainingProblem(Protocol):
    """A model with its data and loss.

    Attributes:
      start: the initial parameters.
    """

    @property
    def start(self) -> Arrays: ...

    def gradient(self, params: Arrays, worker: int, step: int) -> Computed:
        """Compute the gradient on a worker's data for a step, as a pure function."""
        ...

    def loss(self, params: Arrays) -> float:
        """Compute the loss for the curve, on held-out data or on training data."""
        ...


class UpdateRule(Protocol):
    """A separable update rule, which updates any range of any parameter separately.

    Attributes:
      divisible: whether a range may consist of only some rows of a parameter.
    """

    @property
    def learning_rate(self) -> float: ...
    @property
    def divisible(self) -> bool: ...

    def init(self, name: str, array: np.ndarray) -> RuleState: ...

    def update(
        self, name: str, array: np.ndarray, gradient: np.ndarray, rate: float, state: RuleState
    ) -> tuple[np.ndarray, RuleState]:
        """Return the updated array and the optimizer's next state.

        Args:
          name: the name of the parameter.
          rate: the factor by which the learning rate is multiplied.
        """
        ...


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent: b <- m b + g, then w <- w - rate b (Nesterov: g + m b)."""

    learning_rate: float
    momentum: float = 0.0
    nesterov: bool = False

    @property
    def divisible(self) -> bool:
        return True

    def init(self, name: str, array: np.ndarray) -> RuleState:
        return np.zeros_like(array) if self.momentum else None

    def update(
        self, name: str, array: np.ndarray, gradient: np.ndarray, rate: float, state: RuleState
    ) -> tuple[np.ndarray, RuleState]:
        step = gradient
        if state is not None:
            state = self.momentum * state + gradient
            step = gradient + self.momentum * state if self.nesterov else state
        return array - (self.learning_rate * rate) * step, state
