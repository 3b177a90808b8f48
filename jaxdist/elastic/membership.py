"""Membership: hosts hold leases, and at most one generation of hosts is active at any time.

A registry receives renewals from hosts and grants leases on its current generation. A host is
active while it holds a lease. This module does no I/O and reads no clock: the caller supplies the
time and carries the messages. Messages may be lost, delayed, duplicated and reordered. The clocks
may differ by any offset, but the rate of each clock is wrong by `drift` at most.

Two generations are never active at the same time. A host counts its lease from its request, and the
registry counts the lease from the answer, which is later. The host also shortens its lease by the
drift between two clocks. To end a generation, the registry stops granting leases on that
generation. The registry starts the next generation only when each lease has expired, or its holder
has reported that it stopped. A host never resumes a generation that it has stopped, so old messages
do no harm. (Gray and Cheriton, "Leases", SOSP 1989.)

A host that is suspended after it has checked its lease may still write too late. The number of its
generation therefore is a fencing token, which storage compares with its `Fence`
(`jaxdist.heartbeat.fence`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxdist.elastic.quarantine import Fits, able, all_fit
from jaxdist.heartbeat.config import MembershipConfig


@dataclass(frozen=True)
class Generation:
    """A set of hosts that train together.

    Attributes:
      number: the fencing token, larger than the number of every earlier generation.
      members: the hosts, in the order in which they joined.
    """

    number: int = 0
    members: tuple[str, ...] = ()

    @property
    def coordinator(self) -> str:
        """The member to which the other members connect: the host that joined first."""
        return self.members[0]


@dataclass(frozen=True)
class Renew:
    """A host's request for a lease.

    Attributes:
      host: a name that no other agent has, not even a later agent on the same machine.
      sent: the time of the request, by the host's clock.
      stopped: the newest generation that the host has stopped; the host never resumes it.
      leaves: whether this is the host's last message, which requests no lease.
      quarantined: whether the host asks to be left out if the other hosts can continue without it.
    """

    host: str
    sent: float
    stopped: int
    leaves: bool = False
    quarantined: bool = False


@dataclass(frozen=True)
class Grant:
    """The registry's answer that grants a host a lease on a generation.

    Attributes:
      sent: the time of the request, by the host's clock, at which the lease starts.
      pauses: whether the generation has to save and stop at its next boundary, so that it can grow.
    """

    generation: Generation
    sent: float
    pauses: bool = False


@dataclass(frozen=True)
class Stop:
    """An order to the receiver to end every generation whose number is below `token`."""

    token: int


@dataclass(frozen=True)
class Host:
    """The state that a host keeps about its last lease and generation.

    Attributes:
      stopped: the newest generation that the host has stopped; the host never resumes it.
      generation: the generation of the host's last lease, or None before the first lease.
      until: the end of the host's last lease, by the host's clock.
      pauses: whether the generation has to save and stop.
      quarantined_until: the time until which the host asks to be left out, by the host's clock.
    """

    name: str
    stopped: int = 0
    generation: Generation | None = None
    until: float = -math.inf
    pauses: bool = False
    quarantined_until: float = -math.inf

    def renew(self, now: float, *, leaves: bool = False) -> Renew:
        """Return the host's next renewal.

        A host sends several renewals during each lease, and stops its generation before it leaves.

        Args:
          now: the current time, by the host's clock.
          leaves: whether the renewal is the host's last message.
        """
        return Renew(self.name, now, self.stopped, leaves, now < self.quarantined_until)

    def was_stuck(self, config: MembershipConfig, now: float) -> Host:
        """Return the state in which the host asks to be left out for a while."""
        return replace(self, quarantined_until=now + config.stuck_host_seconds)

    def at_work(self, now: float) -> Generation | None:
        """Return the generation in which the host is active, or None without a valid lease."""
        return self.generation if now < self.until else None

    def stop(self, token: int) -> Host:
        """Return the state after the host has stopped all generations numbered below `token`."""
        stopped = max(self.stopped, token - 1)
        if self.generation is None or self.generation.number > stopped:
            return replace(self, stopped=stopped)
        return Host(self.name, stopped, quarantined_until=self.quarantined_until)

    def hear(self, config: MembershipConfig, message: Grant | Stop) -> Host:
        """Return the state of the host after an answer from the registry."""
        if isinstance(message, Stop):
            return self.stop(message.token)
        given, until = message.generation, message.sent + config.held_seconds
        # A late or duplicated grant is ignored, since it could make an ended generation overlap the
        # next generation.
        if given.number <= self.stopped:
            return self
        if given == self.generation:
            # Grants may arrive in another order than the registry sent them. An older grant must
            # not cancel a pause or shorten the lease.
            pauses = self.pauses or message.pauses
            return replace(self, until=max(self.until, until), pauses=pauses)
        stopped = max(self.stopped, given.number - 1)
        return Host(self.name, stopped, given, until, message.pauses, self.quarantined_until)


@dataclass(frozen=True)
class Registry:
    """The state of the registry, which the leader stores; a new leader calls `restarted`.

    Attributes:
      alive: the end of each host's registration, by the registry's clock.
      generation: the newest generation.
      granted: whether leases on the newest generation are still granted.
      holders: the time until which each host may hold a lease on the newest generation.
      since: the time when a host last joined or left.
      pauses: whether the generation has to save and stop, so that more hosts can take part.
      quarantined: the hosts that ask to be left out.
    """

    alive: Mapping[str, float] = field(default_factory=dict)
    generation: Generation = Generation()
    granted: bool = False
    holders: Mapping[str, float] = field(default_factory=dict)
    since: float = -math.inf
    pauses: bool = False
    quarantined: frozenset[str] = frozenset()

    def restarted(self, config: MembershipConfig, now: float) -> Registry:
        """Return the registry for a leader that has read it, and whose clock may differ.

        If the generation is active, the earlier leader may have granted leases after it wrote the
        registry. Every member is therefore assumed to hold a lease.

        Args:
          config: the settings of membership.
          now: the current time, by the clock of the new leader.
        """
        members = self.generation.members if self.granted else tuple(self.holders)
        return replace(
            self,
            alive=dict.fromkeys(self.alive, now + config.lease_seconds),
            holders=dict.fromkeys(members, now + config.lease_seconds),
            since=now,
        )

    def receive(
        self, config: MembershipConfig, now: float, message: Renew, fits: Fits = all_fit
    ) -> tuple[Registry, Grant | Stop]:
        """Return the state after a renewal, and the answer to the host that sent the renewal.

        Args:
          fits: the function that returns whether hosts can work together; hosts that ask to be left
            out are not passed to this function.
        """
        known = self.heard(config, now, message).passed(config, now, fits)
        number = known.generation.number
        if known.granted and message.host in known.generation.members:
            holders = {**known.holders, message.host: now + config.lease_seconds}
            grant = Grant(known.generation, message.sent, known.pauses)
            return replace(known, holders=holders), grant
        # While leases on the generation are granted, only earlier generations must end. Afterwards
        # the members of the generation must stop too.
        return known, Stop(number if known.granted else number + 1)

    def heard(self, config: MembershipConfig, now: float, message: Renew) -> Registry:
        """Return the state with the registrations and leases that follow from a renewal.

        The next generation does not start here, but in `passed`.

        Args:
          config: the settings of membership.
          now: the current time, by the registry's clock.
          message: the renewal.
        """
        alive, holders, granted = dict(self.alive), dict(self.holders), self.granted
        came = message.host not in alive
        if message.leaves:
            alive.pop(message.host, None)
        else:
            alive[message.host] = now + config.lease_seconds
        if message.stopped >= self.generation.number:
            holders.pop(message.host, None)
            # A member that has stopped the generation cannot return to the generation, and
            # therefore counts as lost.
            granted = granted and message.host not in self.generation.members
        asks = {message.host} if message.quarantined else set()
        quarantined = self.quarantined - {message.host} | asks
        back = message.host in self.quarantined - quarantined
        # The departure of an unknown host, and a renewal of a known host, do not change which hosts
        # are known, so `since` stays.
        since = now if came != message.leaves or back else self.since
        given = {"holders": holders, "granted": granted, "since": since}
        return replace(self, alive=alive, quarantined=quarantined, **given)

    def passed(self, config: MembershipConfig, now: float, fits: Fits = all_fit) -> Registry:
        """Return the state at time `now`, without the registrations and leases that have expired.

        If the registration of a member has expired, its generation gets no further leases. If the
        generation can grow, its members are asked to pause. When the generation gets no further
        leases and no lease on it is left, the next generation starts.
        """
        alive = {host: until for host, until in self.alive.items() if until > now}
        since = self.since if len(alive) == len(self.alive) else now
        holders = {host: until for host, until in self.holders.items() if until > now}
        quarantined = self.quarantined & alive.keys()
        known = replace(self, alive=alive, holders=holders, since=since, quarantined=quarantined)
        if known.granted and not known.alive.keys() >= set(known.generation.members):
            known = replace(known, granted=False)
        if known.granted and known._grows(config, now, fits):
            # The members end the generation themselves after a save, so that no step is lost.
            known = replace(known, pauses=True)
        # No host holds a valid lease any longer, so the two generations cannot overlap.
        if not known.granted and not holders:
            known = known._begun(config, now, fits)
        return known

    def _grows(self, config: MembershipConfig, now: float, fits: Fits) -> bool:
        members = self.generation.members
        grows = len(members) < config.max_hosts and len(self.alive) > len(members)
        return (
            grows
            and self._settled(config, now)
            and not set(self._able(config, fits)) <= set(members)
        )

    def _begun(self, config: MembershipConfig, now: float, fits: Fits) -> Registry:
        hosts = self._able(config, fits)
        settled = len(hosts) >= config.max_hosts or self._settled(config, now)
        if len(hosts) < config.min_hosts or not settled:
            return self
        # The hosts are in the order of joining, so the hosts that joined first remain. These hosts
        # have the newest snapshots.
        following = Generation(self.generation.number + 1, hosts[: config.max_hosts])
        return replace(self, generation=following, granted=True, pauses=False)

    def _settled(self, config: MembershipConfig, now: float) -> bool:
        # Hosts join one after another. Without this wait, each host that joins would start a
        # generation.
        return now - self.since >= config.settle_seconds

    def _able(self, config: MembershipConfig, fits: Fits) -> tuple[str, ...]:
        return able(self.alive, self.quarantined, config.min_hosts, config.max_hosts, fits)
