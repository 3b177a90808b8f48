"""The consistency model of local steps, whose servers merge the workers' changes of parameters."""

from __future__ import annotations

from typing import ClassVar, Literal

import optax
from pydantic import NonNegativeFloat, PositiveFloat, model_validator

from jaxdist.config.schema import Count
from jaxdist.errors import ConfigError
from jaxdist.optim.common import Beta
from jaxdist.param_server.consistency.contract import Arrival, Clocks, Consistency, Merge, Payload
from jaxdist.param_server.consistency.rounds import mean_of


class Decoupled(Consistency):
    """A model that merges when enough workers have sent changes, or when a grace window has closed.

    A worker takes `local_steps` steps alone and pushes the change of its parameters. The outer
    optimizer (SGD) moves the parameters by the mean of the pending changes, weighted by tokens. A
    change that arrives later joins the next merge. The method is Decoupled DiLoCo (arXiv
    2604.21428). With all workers in every merge, the method is DiLoCo (arXiv 2311.08105, algorithm
    1). With `learning_rate` 1 and no momentum, the method averages parameters.
    """

    type: Literal["decoupled"] = "decoupled"
    """The name that selects this consistency model in a config."""
    payload: ClassVar[Payload] = "outer"
    local_steps: Count = 100
    """The number of steps that a worker takes from one push to the next."""
    quorum: Count | None = None
    """The number of pending changes that triggers a merge; null waits for all members."""
    grace_seconds: NonNegativeFloat | None = None
    """The time, in seconds, from the first pending change to a merge that leaves out the missing
    changes; null waits for the quorum."""
    at_least: Count = 1
    """The smallest number of changes that is merged when the grace window has closed."""
    oldest: Count | None = None
    """The largest age of a change, in merges. An older change is dropped; null drops no change."""
    learning_rate: PositiveFloat = 0.7
    """The learning rate of the outer optimizer."""
    momentum: Beta = 0.9
    """The momentum of the outer optimizer; 0 uses no momentum."""
    nesterov: bool = True
    """Whether the outer optimizer uses Nesterov momentum."""

    @model_validator(mode="after")
    def _fits(self) -> Decoupled:
        if self.at_least > 1 and self.grace_seconds is None:
            raise ValueError(
                f"at_least {self.at_least} has no effect without grace_seconds: set grace_seconds, "
                "or leave at_least out"
            )
        if self.quorum is not None and self.at_least > self.quorum:
            raise ValueError(
                f"at_least {self.at_least} exceeds quorum {self.quorum}, at which changes are "
                "merged in any case: lower at_least"
            )
        if self.nesterov and not self.momentum:
            raise ValueError(
                "nesterov has no effect without momentum: set momentum, or leave nesterov out"
            )
        return self

    def outer(self) -> optax.GradientTransformation:
        """Return the outer optimizer, which takes the negative of a merged change as gradient."""
        return optax.sgd(self.learning_rate, self.momentum or None, self.nesterov)

    def check(self, *, workers: int, learning_rate: float) -> None:
        for name, value in (("quorum", self.quorum or 1), ("at_least", self.at_least)):
            if value > workers:
                raise ConfigError(
                    f"strategy.consistency.{name} {value} can never be reached by {workers} "
                    f"workers: set at most {workers}",
                    setting=(name,),
                )

    def refusal(self, clocks: Clocks, arrival: Arrival) -> str | None:
        age = clocks.version - arrival.version
        if self.oldest is not None and age > self.oldest:
            return f"the push is {age} merges old, but strategy.consistency.oldest is {self.oldest}"
        # Even a change that adds nothing is not refused, because a quorum of all members would wait
        # for ever for a refused change.
        return None

    def due(self, clocks: Clocks, now: float) -> Merge | None:
        # After members have left, fewer changes are needed, so that no merge waits for ever.
        members = max(1, len(clocks.clocks))
        enough = len(clocks.held) >= min(self.quorum or members, members)
        wake = self.wake(clocks)
        closed = wake is not None and now >= wake
        return mean_of(clocks.held, clocks.version) if enough or closed else None

    def fresh(self, floor: int, clock: int) -> bool:
        return True

    def admits(self, clocks: Clocks, client: int) -> bool:
        """Return whether all changes of a worker are merged."""
        return all(one.client != client for one in clocks.held)

    def reachable(self, clocks: Clocks, arrival: Arrival) -> bool:
        return self.admits(clocks, arrival.client)

    def wake(self, clocks: Clocks) -> float | None:
        fewest = max(1, min(self.at_least, len(clocks.clocks)))
        if self.grace_seconds is None or len(clocks.held) < fewest:
            return None
        return min(one.seconds for one in clocks.held) + self.grace_seconds
