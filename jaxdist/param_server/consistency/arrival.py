"""The consistency models that apply changes on arrival: asynchronous, or bounded (SSP)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from jaxdist.config.schema import Config
from jaxdist.optim.common import Beta
from jaxdist.param_server.consistency.contract import (
    Arrival,
    Clocks,
    Consistency,
    Merge,
    Reads,
    WeightedChange,
)

Bound = Annotated[int, Field(ge=0, le=2**20)]


class DelayCompensation(Config):
    """The settings of DC-ASGD, a first-order correction of stale gradients.

    The correction accounts for the movement of the parameters since the worker read them. Zheng et
    al., "Asynchronous stochastic gradient descent with delay compensation" (arXiv 1609.08326). The
    server keeps the version that each worker has read.
    """

    strength: PositiveFloat = 0.04
    """The factor by which the correction is multiplied (lambda in arXiv 1609.08326)."""
    decay: Beta | None = None
    """The decay of a running mean of squared gradients. The correction is divided by the root of
    the mean; with null, the correction is not divided."""


class OnArrival(Consistency):
    """The base of consistency models that apply each gradient on arrival, as a separate update."""

    gradient_weight: Literal["share", "whole"] = "share"
    """The weight of a gradient. With share, the learning rate is divided by the number of workers,
    so that one gradient from each worker moves the parameters as far as one synchronous step. With
    whole, each gradient is a full step."""
    staleness_power: Annotated[float, Field(ge=0, le=4)] = 0.0
    """The power of the staleness by which the learning rate is divided, if the staleness is above
    1; with power 0, the learning rate is not divided. The staleness is in clocks with
    gradient_weight share, and in updates with whole."""
    delay_compensation: DelayCompensation | None = None
    """The correction of gradients for the movement of the parameters since the worker read them;
    null corrects nothing."""
    value_bound: PositiveFloat | None = None
    """The bound on unapplied changes. A worker pauses while any element of its unapplied changes
    exceeds this number divided by the number of workers. null sets no bound."""

    @model_validator(mode="after")
    def _counts(self) -> OnArrival:
        if self.value_bound is not None and not self.ahead:
            raise ValueError(
                f"value_bound {self.value_bound:g} has no effect with reads {self.how()}: a worker "
                "waits until its last change is applied, so it never has unacknowledged changes; "
                "set reads: ahead"
            )
        return self

    def due(self, clocks: Clocks, now: float) -> Merge | None:
        if not clocks.held:
            return None
        staleness = clocks.version - clocks.held[0].version
        part = WeightedChange(clocks.held[0], 1.0, staleness)
        return Merge((part,), rate=self.rate(staleness, clocks.team))

    def holds_back(self, largest: float, workers: int) -> bool:
        """Return whether a worker must wait before it computes again.

        While every worker stays below `value_bound` / workers, the sum of all unapplied changes
        stays below the bound in every element. The change that crosses the limit is already sent,
        so the sum may exceed the bound by one change per worker.

        Args:
          largest: the largest magnitude of an element in the sum of the worker's unapplied changes.
        """
        # The comparison is negated, so that it is also true if the changes contain a NaN.
        return self.value_bound is not None and not largest < self.value_bound / workers

    def rate(self, staleness: int, team: int) -> float:
        """Return the factor by which the learning rate of a change is multiplied.

        The factor depends on the staleness of the change and, if `gradient_weight` is "share", on
        the number of workers. With power 1, the factor is from Zhang et al. (arXiv 1511.05950).

        Args:
          staleness: the staleness of the change, in updates.
          team: the number of workers.

        >>> Asynchronous(staleness_power=1.0, gradient_weight="whole").rate(4, team=8)
        0.25
        """
        unit = 1 / team if self.gradient_weight == "share" else 1.0
        return unit * max(1.0, unit * staleness) ** -self.staleness_power


class Asynchronous(OnArrival):
    """A model in which workers never wait.

    Dean et al., "Large scale distributed deep networks", 2012.
    """

    type: Literal["async"] = "async"
    """The name that selects this consistency model in a config."""
    reads: Literal["each_clock", "ahead"] = "each_clock"
    """The rule for pulls. each_clock: the worker pulls before every computation. ahead: when a
    computation begins, the worker pulls for the next computation, and does not wait for the
    answer."""

    def how(self) -> Reads:
        return self.reads

    def fresh(self, floor: int, clock: int) -> bool:
        return True


class BoundedStaleness(OnArrival):
    """The common part of consistency models that bound the lead over the slowest worker."""

    reads: Reads = "each_clock"
    """The rule for pulls. each_clock: the worker pulls before every computation. ahead: when a
    computation begins, the worker pulls for the next computation. While the old copy is within the
    bound, the next computation does not wait for the answer, so the copy may lack the worker's last
    changes. lazy: the worker pulls when its copy is older than the bound allows, or lacks one of
    the worker's changes. eager: like lazy, and the server also sends new parameters whenever the
    slowest clock advances."""

    def how(self) -> Reads:
        return self.reads


class SSP(BoundedStaleness):
    """Stale synchronous parallel: no worker is more than `bound` clocks ahead of the slowest.

    A worker at clock c reads a version that contains all changes of all workers from clocks before
    c - bound. The version also contains all changes of that worker, except with reads `ahead`, and
    possibly newer changes of other workers (Ho et al., NIPS 2013). In that paper a worker adds its
    changes to its old copy itself, so lazy and eager reads (ESSP; Dai et al., arXiv 1410.8043) save
    pulls. Here workers push gradients and the server's optimizer computes the change, so a worker
    must pull after every push.
    """

    type: Literal["ssp"] = "ssp"
    """The name that selects this consistency model in a config."""
    bound: Bound = 2
    """The number of clocks that a worker may be ahead of the slowest worker."""

    def fresh(self, floor: int, clock: int) -> bool:
        return clock - floor <= self.bound


class AdaptiveSSP(BoundedStaleness):
    """SSP with an adaptive bound: a fast worker runs ahead when that shortens its wait.

    A worker that is at most `least` clocks ahead of the slowest worker never waits. Beyond `least`,
    the times of the last two pushes of this worker and of the slowest worker predict the next
    pushes of both workers. The worker continues, up to `most` clocks ahead, if more clocks would
    make its predicted wait shorter than its wait now. Zhao et al., "Dynamic stale synchronous
    parallel" (arXiv 1908.11848), predict once for several clocks; here every clock is predicted
    separately, from the newest times.
    """

    type: Literal["adaptive"] = "adaptive"
    """The name that selects this consistency model in a config."""
    least: Bound = 1
    """The number of clocks that a worker may always be ahead of the slowest worker."""
    most: Bound = 8
    """The largest number of clocks that a worker can be ahead of the slowest worker."""

    @model_validator(mode="after")
    def _fits(self) -> AdaptiveSSP:
        if self.least >= self.most:
            raise ValueError(
                f"least {self.least} and most {self.most} leave no range in which the bound can "
                f"adapt: set a larger most, or type: ssp with bound: {self.least}"
            )
        return self

    def fresh(self, floor: int, clock: int) -> bool:
        # Beyond `least`, only the server can decide whether the worker may compute (`admits`), so
        # the worker must ask the server.
        return clock - floor <= self.least

    def admits(self, clocks: Clocks, client: int) -> bool:
        lead = clocks.clocks[client] - clocks.floor
        if lead <= self.least:
            return True
        left = self.most - lead + 1
        return left > 0 and extra_clocks(clocks.pushed, client, _slowest(clocks), left) > 0

    def reachable(self, clocks: Clocks, arrival: Arrival) -> bool:
        return arrival.clock - clocks.floor <= self.most


def _slowest(clocks: Clocks) -> int:
    def key(client: int) -> tuple[int, float, int]:
        return clocks.clocks[client], clocks.pushed.get(client, (0.0,))[-1], client

    return min(clocks.clocks, key=key)


def extra_clocks(
    pushed: Mapping[int, tuple[float, ...]], reader: int, slowest: int, most: int
) -> int:
    """Return the number of extra clocks that minimizes the wait for the slowest worker's next push.

    Args:
      pushed: the arrival times of each worker's last two changes, in seconds.
      reader: the worker that may run ahead.
      slowest: the slowest worker.
      most: the largest number of extra clocks.

    Returns:
      The smallest number with the shortest wait, or 0 until both workers have pushed twice.

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
        # The negated floor division rounds up. It counts the pushes of the slowest worker until the
        # first push that is not before `done`.
        pushes = max(1, -((slow[1] - done) // pace))
        return slow[1] + pushes * pace - done

    return min(range(most + 1), key=lambda clocks: (wait(clocks), clocks))
