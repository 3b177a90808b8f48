"""A standby host, which waits until it can join a generation."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from jaxdist.elastic.hosts.leader_election import registry_of
from jaxdist.elastic.hosts.member import Membership
from jaxdist.elastic.hosts.messages import HostMessages
from jaxdist.elastic.hosts.rendezvous.contract import LostError, RendezvousError
from jaxdist.elastic.membership import Generation
from jaxdist.errors import RunError
from jaxdist.runtime.rendezvous import Wait

READ_SECONDS = 1.0
"""The time between two reads of the registry, in seconds."""
SURE_LEASES = 2
"""The number of leases after which a generation is reported as running. A younger generation may
just have been lost."""


@dataclass
class Standby:
    """The wait of a host until it joins a generation.

    The wait times out only while no generation runs.

    Args:
      clock: the function that returns the time of a monotonic clock, in seconds.
    """

    members: Membership
    messages: HostMessages
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    wait: Wait = field(init=False)
    _read: float = field(default=0.0, init=False)
    _since: tuple[int, float] = field(default=(0, 0.0), init=False)
    _told: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.wait = Wait(self.messages.seconds, self.say, self.clock)

    def look(self) -> None:
        """Print the messages that are due, and check that the wait has not timed out.

        Raises:
          RunError: no generation started in time, or the rendezvous lost its content.
        """
        if isinstance(self.members.trouble, LostError):
            raise self.members.trouble  # The rendezvous is lost: a longer wait cannot help.
        now = self.clock()
        if now - self._read >= READ_SECONDS or self.wait.over:
            self._read = now
            number = self._others_at_work()
            if number is not None:
                self.wait = Wait(self.messages.seconds, self.say, self.clock)
                self._tell(number, now)
        if self.wait.over:
            raise RunError(self.messages.too_few())
        if self.wait.elapsed >= 1:
            self.messages.tell_wait(self.wait)

    def taken(self, generation: Generation) -> None:
        """Print a message if this host takes part although it asked to be left out."""
        if self.members.quarantined_seconds:
            self.say(
                f"generation {generation.number} includes this host, {self.messages.name}, "
                "although one of its processes was stuck: without this host there would be fewer "
                "hosts than --min, or the devices would form no mesh"
            )

    def _others_at_work(self) -> int | None:
        """Return the number of a generation that runs without this host, or None."""
        if self.members.trouble is not None:
            return None
        with suppress(RendezvousError):
            registry = registry_of(self.members.rendezvous)
            if registry is not None and registry.granted:
                generation = registry.generation
                return None if self.members.own in generation.members else generation.number
        return None

    def _tell(self, number: int, now: float) -> None:
        if self._since[0] != number:
            self._since = number, now
        left = self.members.quarantined_seconds
        sure = left or now - self._since[1] >= SURE_LEASES * self.members.config.lease_seconds
        if self._told or not sure:
            return
        self._told = True
        stuck = f" for {left:.0f} s, because one of its processes was stuck" if left else ""
        self.say(
            f"this host, {self.messages.name}, waits in reserve during generation {number}{stuck}"
        )
