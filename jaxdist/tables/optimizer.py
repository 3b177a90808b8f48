"""Row-wise optimizers, which update only the rows that a batch touched.

Dims: N rows, D width. The state of a row is stored after its D values.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveFloat

from jaxdist.config.schema import Config
from jaxdist.optim.common import Beta


class RowOptimizer(Config):
    """The settings of every row-wise optimizer."""

    learning_rate: PositiveFloat | None = None
    """The constant learning rate of rows; null takes the learning rate of optim at each step."""

    @abstractmethod
    def state_width(self, width: int) -> int:
        """Return the number of values in a row's state, which begin at zero.

        Args:
          width: the number of values in a row.
        """

    @abstractmethod
    def update(self, rows: np.ndarray, grads_ND: np.ndarray, rate: float) -> None:
        """Update rows and their state in place.

        Args:
          rows: the rows with their state, float32 `[N, D + state_width]`.
          grads_ND: the gradients, summed over all examples that look a row up.
          rate: the learning rate.
        """


class RowSgd(RowOptimizer):
    """Gradient descent, with the same result as a dense table with `{type: sgd, momentum: 0}`."""

    type: Literal["sgd"] = "sgd"
    """The name that selects this optimizer in a config."""

    def state_width(self, width: int) -> int:
        return 0

    def update(self, rows: np.ndarray, grads_ND: np.ndarray, rate: float) -> None:
        rows -= np.float32(rate) * grads_ND


class RowAdagrad(RowOptimizer):
    """Adagrad (Duchi et al., JMLR 12, 2011): w -= rate g / (sqrt(sum of g^2) + eps).

    Rows that no example looks up have a gradient of zero, so the result equals Adagrad on a dense
    table.
    """

    type: Literal["adagrad"] = "adagrad"
    """The name that selects this optimizer in a config."""
    per: Literal["element", "row"] = "row"
    """The unit of the sums of squared gradients. element keeps a sum for each value of a row. row
    keeps one sum for each row, to which each update adds the mean square of the row's gradient.
    This needs D times less memory (D is the width of a row)."""
    eps: PositiveFloat = 1e-8
    """A small number that is added to the root of the sum of squared gradients, so that no update
    divides by zero."""

    def state_width(self, width: int) -> int:
        return width if self.per == "element" else 1

    def update(self, rows: np.ndarray, grads_ND: np.ndarray, rate: float) -> None:
        width = grads_ND.shape[1]
        square = np.square(grads_ND)
        rows[:, width:] += square if self.per == "element" else square.mean(1, keepdims=True)
        rows[:, :width] -= (
            np.float32(rate) * grads_ND / (np.sqrt(rows[:, width:]) + np.float32(self.eps))
        )


class RowLazyAdam(RowOptimizer):
    """Adam that updates a row and its moments only in steps in which an example looks the row up.

    The moments of other rows do not decay, and the bias correction counts the updates of the row
    instead of steps. Adam on a dense table, in contrast, moves every row in every step.
    """

    type: Literal["lazy_adam"] = "lazy_adam"
    """The name that selects this optimizer in a config."""
    b1: Beta = 0.9
    """The decay of the first moment, which is the running mean of gradients."""
    b2: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """The decay of the second moment, which is the running mean of squared gradients."""
    eps: PositiveFloat = 1e-8
    """A small number that is added to the root of the second moment, so that no update divides by
    zero."""

    def state_width(self, width: int) -> int:
        return 2 * width + 1

    def update(self, rows: np.ndarray, grads_ND: np.ndarray, rate: float) -> None:
        width = grads_ND.shape[1]
        first, second = rows[:, width : 2 * width], rows[:, 2 * width : -1]
        count = rows[:, -1:]
        b1, b2 = np.float32(self.b1), np.float32(self.b2)
        first *= b1
        first += (1 - b1) * grads_ND
        second *= b2
        second += (1 - b2) * np.square(grads_ND)
        count += 1
        root = np.sqrt(second / (1 - b2**count)) + np.float32(self.eps)
        rows[:, :width] -= np.float32(rate) * first / (1 - b1**count) / root


RowOptimizerConfig = Annotated[RowSgd | RowAdagrad | RowLazyAdam, Field(discriminator="type")]
