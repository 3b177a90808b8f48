"""Who takes part: hosts hold leases, and one generation of them at a time is at work.

A registry hears from hosts and grants leases on its generation; a host is at work while it holds
one. Nothing here does I/O or reads a clock: who calls gives the time and carries the messages,
which may be lost, late, doubled and in any order. Clocks may have any offset; each runs too fast or
too slow by `drift` at most.

Never are two generations at work, at any moment. A host counts its lease from when it asked, the
registry from when it answered, which is later; the host's is shorter by what clocks may drift
apart. The registry ends a generation by granting no more of it, and begins the next only when each
lease on it has run out or its holder has said that it stopped. What a host has stopped it never
takes up again, so that old messages do no harm. (Gray and Cheriton, "Leases", SOSP 1989.)

A host that is suspended between looking at its lease and writing may still write too late: the
number of its generation is a fencing token, and what is written to keeps a `Fence`
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
    """Hosts that work together.

    Attributes:
      number: greater than those of all generations before; the fencing token.
      members: in the order in which they came.
    """

    number: int = 0
    members: tuple[str, ...] = ()

    @property
    def coordinator(self) -> str:
        """The member that all others meet at: the one that has been there longest."""
        return self.members[0]


@dataclass(frozen=True)
class Renew:
    """A host asks for a lease.

    Attributes:
      host: a name that no other process has, nor the same host after it began anew.
      sent: when, by its own clock.
      stopped: it never again takes up this generation, or one before.
      leaves: it asks for the last time, and for nothing.
      aside: it shall be left out where the others can go on without it.
    """

    host: str
    sent: float
    stopped: int
    leaves: bool = False
    quarantined: bool = False


@dataclass(frozen=True)
class Grant:
    """A lease on a generation, counted from when it was asked for (`sent`, the host's clock).

    Attributes:
      pauses: whether it is to save and stop at its next boundary, so that it can grow.
    """

    generation: Generation
    sent: float
    pauses: bool = False


@dataclass(frozen=True)
class Stop:
    """No generation with a smaller number than `token` may be at work any more."""

    token: int


@dataclass(frozen=True)
class Host:
    """What a host knows.

    Attributes:
      stopped: generations up to this one it never takes up again.
      generation: that of its last lease.
      until: when this lease runs out, by its own clock.
      pauses: whether it has heard that the generation is to save and stop.
      aside_until: when it no more asks to be left out, by its own clock.
    """

    name: str
    stopped: int = 0
    generation: Generation | None = None
    until: float = -math.inf
    pauses: bool = False
    quarantined_until: float = -math.inf

    def renew(self, now: float, *, leaves: bool = False) -> Renew:
        """What it says to the registry, several times in each lease; who leaves stops first."""
        return Renew(self.name, now, self.stopped, leaves, now < self.quarantined_until)

    def was_stuck(self, config: MembershipConfig, now: float) -> Host:
        """It asks to be left out for a while."""
        return replace(self, quarantined_until=now + config.stuck_host_seconds)

    def at_work(self, now: float) -> Generation | None:
        """The generation that it works in, if its lease holds."""
        return self.generation if now < self.until else None

    def stop(self, token: int) -> Host:
        """It ends its work in all generations with a smaller number."""
        stopped = max(self.stopped, token - 1)
        if self.generation is None or self.generation.number > stopped:
            return replace(self, stopped=stopped)
        return Host(self.name, stopped, quarantined_until=self.quarantined_until)

    def hear(self, config: MembershipConfig, message: Grant | Stop) -> Host:
        """What it knows after a message."""
        if isinstance(message, Stop):
            return self.stop(message.token)
        given, until = message.generation, message.sent + config.held_seconds
        if given.number <= self.stopped:
            return self
        if given == self.generation:
            pauses = self.pauses or message.pauses
            return replace(self, until=max(self.until, until), pauses=pauses)
        stopped = max(self.stopped, given.number - 1)
        return Host(self.name, stopped, given, until, message.pauses, self.quarantined_until)


@dataclass(frozen=True)
class Registry:
    """What the registry knows; to be kept on disk, and `restarted` when it is read back.

    Attributes:
      alive: by host, until when it counts as alive, by the registry's clock.
      generation: the newest.
      granted: whether it is at work, or was ended.
      holders: by host, until when it may hold a lease on it.
      since: when a host came or went last.
      pauses: whether its hosts were told to save and stop, so that more can take part.
      aside: hosts that ask to be left out.
    """

    alive: Mapping[str, float] = field(default_factory=dict)
    generation: Generation = Generation()
    granted: bool = False
    holders: Mapping[str, float] = field(default_factory=dict)
    since: float = -math.inf
    pauses: bool = False
    quarantined: frozenset[str] = frozenset()

    def restarted(self, config: MembershipConfig, now: float) -> Registry:
        """What was read back from disk, with a clock that may be another one.

        Where it was at work, leases were perhaps granted after it was written, so that all members
        may hold one.
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
        """A message has come: what the registry knows then, and its answer.

        Args:
          fits: whether some hosts can work together without those that ask to be left out.
        """
        known = self.heard(config, now, message).passed(config, now, fits)
        number = known.generation.number
        if known.granted and message.host in known.generation.members:
            holders = {**known.holders, message.host: now + config.lease_seconds}
            grant = Grant(known.generation, message.sent, known.pauses)
            return replace(known, holders=holders), grant
        return known, Stop(number if known.granted else number + 1)

    def heard(self, config: MembershipConfig, now: float, message: Renew) -> Registry:
        """Who is alive, and who has stopped, after a message."""
        alive, holders, granted = dict(self.alive), dict(self.holders), self.granted
        came = message.host not in alive
        if message.leaves:
            alive.pop(message.host, None)
        else:
            alive[message.host] = now + config.lease_seconds
        if message.stopped >= self.generation.number:
            holders.pop(message.host, None)
            # A member that cannot take part any more is as good as lost.
            granted = granted and message.host not in self.generation.members
        asks = {message.host} if message.quarantined else set()
        quarantined = self.quarantined - {message.host} | asks
        back = message.host in self.quarantined - quarantined
        since = now if came != message.leaves or back else self.since
        given = {"holders": holders, "granted": granted, "since": since}
        return replace(self, alive=alive, quarantined=quarantined, **given)

    def passed(self, config: MembershipConfig, now: float, fits: Fits = all_fit) -> Registry:
        """What time alone changes: hosts are lost, a generation ends, the next begins."""
        alive = {host: until for host, until in self.alive.items() if until > now}
        since = self.since if len(alive) == len(self.alive) else now
        holders = {host: until for host, until in self.holders.items() if until > now}
        quarantined = self.quarantined & alive.keys()
        known = replace(self, alive=alive, holders=holders, since=since, quarantined=quarantined)
        if known.granted and not known.alive.keys() >= set(known.generation.members):
            known = replace(known, granted=False)
        if known.granted and known._grows(config, now, fits):
            # Its hosts end it themselves, when they have saved: no step is lost.
            known = replace(known, pauses=True)
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
        # In the order in which they came, so that who was a member before stays one.
        following = Generation(self.generation.number + 1, hosts[: config.max_hosts])
        return replace(self, generation=following, granted=True, pauses=False)

    def _settled(self, config: MembershipConfig, now: float) -> bool:
        return now - self.since >= config.settle_seconds

    def _able(self, config: MembershipConfig, fits: Fits) -> tuple[str, ...]:
        return able(self.alive, self.quarantined, config.min_hosts, config.max_hosts, fits)
