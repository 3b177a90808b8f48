"""Updates on arrival: asynchronous, and with bounded staleness (SSP)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from jaxdist.config.schema import Config
from jaxdist.optim.common import Beta
from jaxdist.param_server.consistency.contract import Arrival, Clocks, Consistency, Merge, Part

Bound = Annotated[int, Field(ge=0, le=2**20)]
Reads = Literal["eager", "lazy", "each_clock", "ahead"]


class DelayCompensation(Config):
    """DC-ASGD: a stale gradient, corrected to first order by what the parameters have moved since.

    Zheng et al., "Asynchronous stochastic gradient descent with delay compensation" (arXiv
    1609.08326). The range keeps the version that each worker has read.
    """

    strength: PositiveFloat = 0.04
    """lambda of the paper: the factor of the correction."""
    decay: Beta | None = None
    """Divide it by the root of a running mean of squared gradients with this decay; null does
    not."""


class OnArrival(Consistency):
    """Models that apply each gradient when it arrives, as an update of its own."""

    gradient_weight: Literal["share", "whole"] = "share"
    """share: the learning rate over the number of workers, so that a gradient of each of them moves
    parameters as far as one synchronous step. whole: each gradient is a whole step."""
    staleness_power: Annotated[float, Field(ge=0, le=4)] = 0.0
    """Divide the learning rate by this power of the staleness, where that is above 1; 0 does not.
    Staleness counts clocks with gradient_weight share, and updates with whole."""
    delay_compensation: DelayCompensation | None = None
    """Correct gradients for what the parameters have moved since they were read; null does not."""
    value_bound: PositiveFloat | None = None
    """A worker computes no further while an element of its changes that are not yet applied is
    above this over the number of workers; null does not look."""

    @model_validator(mode="after")
    def _counts(self) -> OnArrival:
        if self.value_bound is not None and not self.ahead:
            raise ValueError(
                f"value_bound {self.value_bound:g} has no effect with reads {self.how()}: a worker "
                "computes when its last change is applied, and has none under way; set reads: ahead"
            )
        return self

    @abstractmethod
    def how(self) -> Reads:
        """How a worker comes to newer parameters: the setting `reads`."""
        ...

    @property
    def publishes(self) -> bool:
        return self.how() == "eager"

    @property
    def reuses(self) -> bool:
        return self.how() != "each_clock"

    @property
    def ahead(self) -> bool:
        return self.how() == "ahead"

    def due(self, clocks: Clocks, now: float) -> Merge | None:
        if not clocks.held:
            return None
        staleness = clocks.version - clocks.held[0].version
        part = Part(clocks.held[0], 1.0, staleness)
        return Merge((part,), rate=self.rate(staleness, clocks.team))

    def holds_back(self, largest: float, workers: int) -> bool:
        """Is a worker to wait before it computes again?

        With all workers below `value_bound` over their number, what is under way is below the bound
        in every element; the change that crosses the line is under way too, so that the sum may be
        above it by one change of each worker.

        Args:
          largest: of the magnitudes of its changes that are not yet applied, added up by element.
        """
        return self.value_bound is not None and not largest < self.value_bound / workers

    def rate(self, staleness: int, team: int) -> float:
        """The factor of the learning rate (Zhang et al., arXiv 1511.05950, at power 1).

        >>> Asynchronous(staleness_power=1.0, gradient_weight="whole").rate(4, team=8)
        0.25
        """
        unit = 1 / team if self.gradient_weight == "share" else 1.0
        return unit * max(1.0, unit * staleness) ** -self.staleness_power


class Asynchronous(OnArrival):
    """Nobody waits for anybody (Dean et al., "Large scale distributed deep networks", 2012)."""

    type: Literal["async"] = "async"
    """Selects this model."""
    reads: Literal["each_clock", "ahead"] = "each_clock"
    """How a worker comes to newer parameters. each_clock: it asks before every computation. ahead:
    it asks when one begins, for the next, which does not wait for the answer."""

    def how(self) -> Reads:
        return self.reads

    def fresh(self, floor: int, clock: int) -> bool:
        return True


class SSP(OnArrival):
    """Stale synchronous parallel: no worker is more than `bound` clocks ahead of the slowest.

    A worker at clock c reads a version that holds all changes of clocks before c - bound, of all
    workers, all of its own (but with reads `ahead`), and perhaps newer ones (Ho et al., NIPS 2013).
    There a change is a sum that the worker adds to its old copy by itself: lazy reads, and eager
    ones (ESSP; Dai et al., arXiv 1410.8043), then save questions. Here it is a gradient, of which
    the server's optimizer makes the change, so that a worker asks the server.
    """

    type: Literal["ssp"] = "ssp"
    """Selects this model."""
    bound: Bound = 2
    """Clocks that a worker may be ahead of the slowest."""
    reads: Reads = "each_clock"
    """How a worker comes to newer parameters. each_clock: it asks before every computation. ahead:
    it asks when one begins, for the next, which does not wait while the old copy is within the
    bound, and so may lack its own last changes. lazy: it asks when its copy is older than the bound
    allows or lacks a change of its own. eager: as lazy, and the server sends new parameters
    whenever the slowest clock moves."""

    def fresh(self, floor: int, clock: int) -> bool:
        return clock - floor <= self.bound

    def how(self) -> Reads:
        return self.reads


class Adaptive(OnArrival):
    """SSP whose bound moves between two: a fast worker goes on where that shortens its wait.

    Within `least` nobody waits. Above it, the last two pushes of the reader and of the slowest
    worker say when each will push next: the reader goes on, up to `most`, where its wait after some
    more clocks is predicted to be shorter than now. Zhao et al., "Dynamic stale synchronous
    parallel" (arXiv 1908.11848), which predicts once for several clocks; here every clock
    is decided anew, from newer times.
    """

    type: Literal["adaptive"] = "adaptive"
    """Selects this model."""
    least: Bound = 1
    """Clocks ahead of the slowest that are always allowed."""
    most: Bound = 8
    """Clocks ahead of the slowest that are never exceeded."""
    reads: Reads = "each_clock"
    """How a worker comes to newer parameters. each_clock: it asks before every computation. ahead:
    it asks when one begins, for the next, which does not wait while the old copy is within the
    bound, and so may lack its own last changes. lazy: it asks when its copy is older than the bound
    allows or lacks a change of its own. eager: as lazy, and the server sends new parameters
    whenever the slowest clock moves."""

    @model_validator(mode="after")
    def _fits(self) -> Adaptive:
        if self.least >= self.most:
            raise ValueError(
                f"least {self.least} and most {self.most} leave nothing to adapt: give a larger "
                f"most, or type ssp with bound {self.least}"
            )
        return self

    def fresh(self, floor: int, clock: int) -> bool:
        return clock - floor <= self.least

    def admits(self, clocks: Clocks, client: int) -> bool:
        lead = clocks.clocks[client] - clocks.floor
        if lead <= self.least:
            return True
        left = self.most - lead + 1
        return left > 0 and extra_clocks(clocks.pushed, client, _slowest(clocks), left) > 0

    def reachable(self, clocks: Clocks, arrival: Arrival) -> bool:
        return arrival.clock - clocks.floor <= self.most

    def how(self) -> Reads:
        return self.reads


def _slowest(clocks: Clocks) -> int:
    def key(client: int) -> tuple[int, float, int]:
        return clocks.clocks[client], clocks.pushed.get(client, (0.0,))[-1], client

    return min(clocks.clocks, key=key)


def extra_clocks(
    pushed: Mapping[int, tuple[float, ...]], reader: int, slowest: int, most: int
) -> int:
    """How many more clocks leave the reader the shortest wait for the slowest worker's next push.

    Args:
      pushed: by worker, when its last two changes arrived, in seconds.
      most: clocks that it may take.

    Returns:
      The fewest of those with the shortest wait; 0 while a worker has not pushed twice.

    >>> extra_clocks({0: (2.0, 3.0), 1: (0.0, 5.5)}, reader=0, slowest=1, most=4)
    4
    >>> extra_clocks({0: (9.0, 10.0), 1: (0.0, 5.5)}, reader=0, slowest=1, most=4)
    1
    """
    fast, slow = pushed.get(reader, ()), pushed.get(slowest, ())
    if len(fast) < 2 or len(slow) < 2 or slow[1] <= slow[0]:
        return 0
    step, pace = fast[1] - fast[0], slow[1] - slow[0]

    def wait(clocks: int) -> float:
        done = fast[1] + clocks * step
        pushes = max(1, -((slow[1] - done) // pace))
        return slow[1] + pushes * pace - done

    return min(range(most + 1), key=lambda clocks: (wait(clocks), clocks))
