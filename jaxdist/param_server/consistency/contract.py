"""The contract of a consistency model, which decides on the merges and the reads of a range.

A *range* is a part of the parameters that one server holds. A *member* is a worker that takes part
in the training of the range.

A worker's *clock* counts the worker's changes that have arrived at the range. The *version* counts
updates of the parameters. The *floor* is a clock: the current version contains all changes of all
workers from earlier clocks. If each change is applied when it arrives, the floor is the smallest
clock of all members. A change is *settled* when it is applied or permanently dropped.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from jaxdist.config.schema import Config

Reads = Literal["eager", "lazy", "each_clock", "ahead"]
"""The rule for pulls, as the setting `reads` of the consistency models explains it."""
Payload = Literal["gradient", "elastic", "outer"]
"""The kind of change that workers push: a gradient for the optimizer; an elastic difference, which
is added directly; or a change of parameters, whose negative is the outer optimizer's gradient."""


@dataclass(frozen=True)
class Arrival:
    """A change that has arrived at a server.

    The changes of a client arrive in the order in which the client sent them.

    Attributes:
      client: the client that sent the change.
      sequence: the number of the message among the client's messages.
      clock: the clock at which the client computed the change, or the number of the round in a
        model of rounds.
      version: the version of the parameters from which the change was computed.
      tokens: the weight of the change in a mean, or 0 if all examples of the batch were masked.
      usable: whether the change contains no NaN and no infinity.
      seconds: the arrival time, in seconds.
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
        """The reason why the change does not affect the parameters, or None if it affects them.

        The client's clock advances in either case. A change with 0 tokens is 0/0, so it may contain
        a NaN.
        """
        if self.tokens == 0:
            return "the push has no tokens"
        return None if self.usable else "the push contains a NaN or an infinity"


@dataclass(frozen=True)
class WeightedChange:
    """A change in a merge, with its weight.

    Attributes:
      weight: the factor of the change in the sum.
      staleness: the number of updates from the version from which the change was computed to the
        current version.
    """

    arrival: Arrival
    weight: float
    staleness: int


@dataclass(frozen=True)
class Merge:
    """An optimizer update: a sum of weighted changes in a fixed order, divided by `total`.

    Attributes:
      parts: the changes, in the order of addition, or an empty tuple if no change of a round
        counts; in this case only the version advances.
      total: the divisor of the weighted sum.
      rate: the factor by which the learning rate is multiplied.
      without: the changes that are settled but not applied, for the reason in `Arrival.nothing`.
    """

    parts: tuple[WeightedChange, ...]
    total: float = 1.0
    rate: float = 1.0
    without: tuple[Arrival, ...] = ()

    @property
    def arrivals(self) -> tuple[Arrival, ...]:
        """All changes that the merge settles."""
        return (*(part.arrival for part in self.parts), *self.without)


@dataclass(frozen=True)
class Clocks:
    """The clocks, the version and the pending changes of one range.

    Attributes:
      team: the number of workers for which the run is planned.
      clocks: the number of changes that have arrived from each member.
      version: the number of updates so far.
      floor: a clock that never decreases; the version contains all changes of all members from
        earlier clocks.
      held: the changes that have arrived and are not merged yet, in order of arrival.
      pushed: the arrival times of each member's last two changes, in seconds.
    """

    team: int
    clocks: Mapping[int, int] = field(default_factory=dict)
    version: int = 0
    floor: int = 0
    held: tuple[Arrival, ...] = ()
    pushed: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """The number of members whose change for the open round is missing, if there are rounds."""
        return sum(clock <= self.version for clock in self.clocks.values())

    def joined(self, client: int) -> Clocks:
        """Return the clocks with a new member, which starts at the floor."""
        assert client not in self.clocks, f"client {client} is a member already"
        return replace(self, clocks={**self.clocks, client: self.floor})

    def left(self, client: int) -> Clocks:
        """Return the clocks without a member; the member's earlier changes can still be merged."""
        clocks = {member: clock for member, clock in self.clocks.items() if member != client}
        pushed = {member: times for member, times in self.pushed.items() if member != client}
        return replace(self, clocks=clocks, pushed=pushed)

    def arrived(self, arrival: Arrival) -> Clocks:
        """Return the clocks after the arrival of a change, which advances its client's clock."""
        times = (*self.pushed.get(arrival.client, ()), arrival.seconds)[-2:]
        return replace(
            self,
            clocks={**self.clocks, arrival.client: arrival.clock + 1},
            held=(*self.held, arrival),
            pushed={**self.pushed, arrival.client: times},
        )


@dataclass(frozen=True)
class Decision:
    """The updates and admitted readers that follow from the changes so far.

    Attributes:
      clocks: the clocks, version and pending changes after the updates.
      merges: the due updates, in order.
      admitted: the waiting members that may read the version after these updates.
    """

    clocks: Clocks
    merges: tuple[Merge, ...]
    admitted: tuple[int, ...]


class Consistency(Config):
    """A consistency model, which decides when changes are merged and which versions may be read."""

    payload: ClassVar[Payload] = "gradient"

    def check(self, *, workers: int, learning_rate: float) -> None:
        """Refuse settings that cannot be combined with the run.

        Raises:
          ConfigError: the settings cannot be combined with the run; the message has the reason.
        """

    def floor_of(self, clocks: Clocks) -> int:
        """Return the clock before which all changes of all workers are in the current version."""
        return min(clocks.clocks.values(), default=clocks.floor)

    def clock_of(self, clocks: Clocks, client: int) -> int:
        """Return the clock of a member's next computation."""
        return clocks.clocks[client]

    def refusal(self, clocks: Clocks, arrival: Arrival) -> str | None:
        """Return the reason why a change is dropped, or None if the change is used.

        The client's clock advances in both cases.
        """
        return arrival.nothing

    @abstractmethod
    def due(self, clocks: Clocks, now: float) -> Merge | None:
        """Return the next update from the pending changes, or None if nothing is due."""

    @abstractmethod
    def fresh(self, floor: int, clock: int) -> bool:
        """Return whether a worker at `clock` may compute from a version whose floor is `floor`."""

    def admits(self, clocks: Clocks, client: int) -> bool:
        """Return whether a member may read the current version for its next computation."""
        return self.fresh(clocks.floor, self.clock_of(clocks, client))

    def reachable(self, clocks: Clocks, arrival: Arrival) -> bool:
        """Return whether a worker that follows the protocol can have sent this change."""
        return self.fresh(clocks.floor, arrival.clock)

    def how(self) -> Reads:
        """Return the rule by which a worker obtains newer parameters (see `Reads`)."""
        return "each_clock"

    @property
    def publishes(self) -> bool:
        """Whether the server sends the new version to all members when `Clocks.floor` increases."""
        return self.how() == "eager"

    @property
    def reuses(self) -> bool:
        """Whether a worker pulls only if its copy is stale or lacks one of the worker's changes."""
        return self.how() != "each_clock"

    @property
    def ahead(self) -> bool:
        """Whether a worker pulls when it begins to compute, and does not wait for the answer."""
        return self.how() == "ahead"

    def wake(self, clocks: Clocks) -> float | None:
        """Return the time at which an update becomes due without a further message.

        The result is None if there is no such time.
        """
        return None


def decide(
    model: Consistency, clocks: Clocks, readers: Iterable[int] = (), now: float = 0.0
) -> Decision:
    """Return all due updates, and the readers that may read after the updates.

    Args:
      readers: the members that wait for parameters.
      now: the current time, in seconds.
    """
    merges = []
    while merge := model.due(clocks, now):
        merges.append(merge)
        settled = {(one.client, one.sequence) for one in merge.arrivals}
        held = tuple(one for one in clocks.held if (one.client, one.sequence) not in settled)
        clocks = replace(clocks, held=held, version=clocks.version + 1)
    clocks = replace(clocks, floor=max(clocks.floor, model.floor_of(clocks)))
    admitted = tuple(client for client in readers if model.admits(clocks, client))
    return Decision(clocks, tuple(merges), admitted)
