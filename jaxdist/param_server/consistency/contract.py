"""The contract of a consistency model: one decision over the version clocks of a range.

A worker's *clock* counts its changes that have arrived at the range, the *version* counts updates
of the parameters. All changes of clocks before the *floor*, of all workers, are in the current
version: for updates on arrival it is the least clock of a member.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from jaxdist.config.schema import Config

Payload = Literal["gradient", "elastic", "outer"]
"""What workers push: a gradient for the optimizer; an elastic difference, which is added as it is;
a change of parameters, whose negative is the gradient of an outer optimizer."""


@dataclass(frozen=True)
class Arrival:
    """A change that has arrived, after all earlier ones of its client.

    Attributes:
      client: who sent it.
      sequence: the number of its message among the client's.
      clock: the client's, of the computation that gave it; in rounds, the round.
      version: of the parameters that it was computed from.
      tokens: how much it counts in a mean; 0 where all examples of its batch were masked.
      usable: does it hold no NaN and no infinity?
      seconds: when it arrived.
    """

    client: int
    sequence: int
    clock: int
    version: int
    tokens: float = 1.0
    usable: bool = True
    seconds: float = 0.0

    @property
    def nothing(self) -> str | None:
        """The reason why the change adds nothing to the parameters; None where it counts.

        Its client's clock advances in either case. A change of no tokens is 0/0 and may hold a NaN.
        """
        if self.tokens == 0:
            return "it has no tokens"
        return None if self.usable else "it holds a NaN or an infinity"


@dataclass(frozen=True)
class Part:
    """One change in a merge.

    Attributes:
      weight: its factor in the sum.
      staleness: updates between the version that it was computed from and this one.
    """

    arrival: Arrival
    weight: float
    staleness: int


@dataclass(frozen=True)
class Merge:
    """One update: the sum of weight times change, in this order, over `total`; then the optimizer.

    Attributes:
      parts: none where no change of a round counts: the version moves, nothing else does.
      total: what the weighted sum is divided by.
      rate: factor of the learning rate.
      without: changes that the round ends without (`Arrival.nothing`).
    """

    parts: tuple[Part, ...]
    total: float = 1.0
    rate: float = 1.0
    without: tuple[Arrival, ...] = ()

    @property
    def arrivals(self) -> tuple[Arrival, ...]:
        """All that it settles."""
        return (*(part.arrival for part in self.parts), *self.without)


@dataclass(frozen=True)
class Clocks:
    """What is known of one range.

    Attributes:
      team: workers that the run is planned with.
      clocks: by member, how many of its changes have arrived.
      version: updates so far.
      floor: see the module; it never falls.
      held: arrived and not yet merged, in order of arrival.
      pushed: by member, when its last two changes arrived, in seconds.
    """

    team: int
    clocks: Mapping[int, int] = field(default_factory=dict)
    version: int = 0
    floor: int = 0
    held: tuple[Arrival, ...] = ()
    pushed: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """Where versions are rounds: members whose change of the open round has not arrived."""
        return sum(clock <= self.version for clock in self.clocks.values())

    def joined(self, client: int) -> Clocks:
        """With a new member, which stands where the slowest do."""
        assert client not in self.clocks, f"client {client} is a member already"
        return replace(self, clocks={**self.clocks, client: self.floor})

    def left(self, client: int) -> Clocks:
        """Without a member; what it has sent stays."""
        clocks = {member: clock for member, clock in self.clocks.items() if member != client}
        pushed = {member: times for member, times in self.pushed.items() if member != client}
        return replace(self, clocks=clocks, pushed=pushed)

    def arrived(self, arrival: Arrival) -> Clocks:
        """With one more change, its client's clock after it."""
        times = (*self.pushed.get(arrival.client, ()), arrival.seconds)[-2:]
        return replace(
            self,
            clocks={**self.clocks, arrival.client: arrival.clock + 1},
            held=(*self.held, arrival),
            pushed={**self.pushed, arrival.client: times},
        )


@dataclass(frozen=True)
class Decision:
    """What follows from what has arrived.

    Attributes:
      clocks: after it.
      merges: updates that are due, in order.
      admitted: members that may read the version after them, of those that wait.
      wake: when time alone will bring something about; None: never.
    """

    clocks: Clocks
    merges: tuple[Merge, ...]
    admitted: tuple[int, ...]
    wake: float | None


class Consistency(Config):
    """A consistency model: when arrived changes are merged, and which versions may be read."""

    payload: ClassVar[Payload] = "gradient"

    def check(self, *, workers: int, learning_rate: float) -> None:
        """Refuse settings that do not go with the run.

        Raises:
          ConfigError: with the reason.
        """

    def floor_of(self, clocks: Clocks) -> int:
        """The clock before which all changes, of all workers, are in the current version."""
        return min(clocks.clocks.values(), default=clocks.floor)

    def clock_of(self, clocks: Clocks, client: int) -> int:
        """The clock of what a member computes next."""
        return clocks.clocks[client]

    def refusal(self, clocks: Clocks, arrival: Arrival) -> str | None:
        """Why a change is not taken, though its client's clock moves on; None: it is."""
        return arrival.nothing

    @abstractmethod
    def due(self, clocks: Clocks, now: float) -> Merge | None:
        """The next update out of what is held; None: nothing is due."""
        ...

    @abstractmethod
    def fresh(self, floor: int, clock: int) -> bool:
        """May a worker at `clock` compute from a version with this floor?"""
        ...

    def admits(self, clocks: Clocks, client: int) -> bool:
        """May a member read the current version for what it computes next?"""
        return self.fresh(clocks.floor, self.clock_of(clocks, client))

    def reachable(self, clocks: Clocks, arrival: Arrival) -> bool:
        """Can a worker have got this far that keeps to what it was answered?"""
        return self.fresh(clocks.floor, arrival.clock)

    @property
    def publishes(self) -> bool:
        """Are new versions sent to all members before they ask, when the floor moves?"""
        return False

    @property
    def reuses(self) -> bool:
        """Does a worker ask only when its copy is not `fresh`, or lacks a change of its own?"""
        return False

    @property
    def ahead(self) -> bool:
        """Does a worker ask for its next parameters when it begins to compute, and not wait?"""
        return False

    def wake(self, clocks: Clocks) -> float | None:
        """When time alone makes something due; None: never."""
        return None


def decide(
    model: Consistency, clocks: Clocks, readers: Iterable[int] = (), now: float = 0.0
) -> Decision:
    """All that is due, and who may read after it: the one decision of a parameter server.

    Args:
      readers: members that wait for parameters.
      now: the time, in seconds.
    """
    merges = []
    while merge := model.due(clocks, now):
        merges.append(merge)
        settled = {(one.client, one.sequence) for one in merge.arrivals}
        held = tuple(one for one in clocks.held if (one.client, one.sequence) not in settled)
        clocks = replace(clocks, held=held, version=clocks.version + 1)
    clocks = replace(clocks, floor=max(clocks.floor, model.floor_of(clocks)))
    admitted = tuple(client for client in readers if model.admits(clocks, client))
    return Decision(clocks, tuple(merges), admitted, model.wake(clocks))
