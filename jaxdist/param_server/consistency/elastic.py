"""The consistency model of elastic averaging: workers train alone, attracted to a centre."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, model_validator

from jaxdist.config.schema import Count
from jaxdist.errors import ConfigError
from jaxdist.param_server.consistency.contract import (
    Arrival,
    Clocks,
    Consistency,
    Merge,
    Payload,
    WeightedChange,
)


class Elastic(Consistency):
    """EASGD, in which a worker and the centre move towards each other after every `every` steps.

    Zhang, Choromanska and LeCun, "Deep learning with elastic averaging SGD" (arXiv 1412.6651),
    algorithm 1. The worker reads the centre c, moves by -alpha (x - c) and pushes alpha (x - c),
    which the server adds to c. The sum of the worker's parameters and the centre is conserved.
    """

    type: Literal["elastic"] = "elastic"
    """The name that selects this consistency model in a config."""
    payload: ClassVar[Payload] = "elastic"
    every: Count = 10
    """The number of steps that a worker takes from one exchange to the next (tau in the paper)."""
    alpha: PositiveFloat | None = None
    """The fraction of the distance between worker and centre by which an exchange moves both; null
    takes beta divided by the number of workers."""
    beta: PositiveFloat | None = None
    """The product of alpha and the number of workers. If alpha and beta are null, beta is 0.9."""
    order: Literal["arrival", "rounds"] = "arrival"
    """The order of exchanges. arrival applies each exchange separately. rounds moves the centre
    once for all workers."""
    curvature: Annotated[float, Field(gt=0)] = 1.0
    """The largest curvature of the loss, by which the stability check multiplies the learning
    rate."""

    @model_validator(mode="after")
    def _fits(self) -> Elastic:
        if self.alpha is not None and self.beta is not None:
            raise ValueError(f"set only one of alpha ({self.alpha:g}) and beta ({self.beta:g})")
        return self

    def rate_of(self, workers: int) -> float:
        """Return alpha, the rate of elastic averaging, for a number of workers."""
        beta = 0.9 if self.beta is None else self.beta
        return beta / workers if self.alpha is None else self.alpha

    def check(self, *, workers: int, learning_rate: float) -> None:
        rate, alpha = learning_rate * self.curvature, self.rate_of(workers)
        most = alpha_limit(rate, workers if self.order == "rounds" else None)
        if rate <= 2 and alpha <= most:
            return
        raise ConfigError(
            f"consistency type elastic diverges on a quadratic: learning rate {learning_rate:g} "
            f"times strategy.consistency.curvature {self.curvature:g} is {rate:g}, and at most 2 "
            f"is stable. alpha is {alpha:.4g}, and with {workers} workers in order {self.order} "
            f"at most {max(most, 0):.4g} is stable. Lower the learning rate or alpha (beta)",
            setting=("beta",) if self.alpha is None else ("alpha",),
        )

    def floor_of(self, clocks: Clocks) -> int:
        return clocks.version if self.order == "rounds" else super().floor_of(clocks)

    def refusal(self, clocks: Clocks, arrival: Arrival) -> str | None:
        # A round waits for a change of each worker, so that even a change that adds nothing is not
        # refused.
        return None if self.order == "rounds" else super().refusal(clocks, arrival)

    def due(self, clocks: Clocks, now: float) -> Merge | None:
        together = self.order == "rounds"
        if not clocks.held or (together and clocks.missing):
            return None
        # The changes are ordered by client, so that the order of summation does not depend on the
        # network.
        taken = sorted(clocks.held, key=_by_client) if together else clocks.held[:1]
        counted = [one for one in taken if one.nothing is None]
        parts = (WeightedChange(one, 1.0, clocks.version - one.version) for one in counted)
        without = tuple(one for one in taken if one.nothing is not None)
        return Merge(tuple(parts), without=without)

    def fresh(self, floor: int, clock: int) -> bool:
        return self.order == "arrival" or floor >= clock


def _by_client(arrival: Arrival) -> tuple[int, int]:
    return arrival.client, arrival.sequence


def alpha_limit(rate: float, workers: int | None) -> float:
    """Return the largest alpha at which EASGD does not diverge on x^2 / 2.

    If W workers exchange at once, the limit keeps the magnitude of three numbers at most 1. Two are
    the eigenvalues of the map of the workers' mean and the centre,
    [[1 - rate - alpha, alpha], [W alpha, 1 - W alpha]], and the third is 1 - rate - alpha. If
    workers exchange one after another, the limit is (4 - 2 rate) / (4 - rate) for any number of
    workers, as in the paper.

    Args:
      rate: the product of learning rate and curvature, at most 2.
      workers: the number of workers that exchange at once, or None for exchanges one after another.

    >>> alpha_limit(1.0, None)
    0.6666666666666666
    """
    if workers is None:
        return (4 - 2 * rate) / (4 - rate)
    return (4 - 2 * rate) / (2 + workers * (2 - rate))
