"""Leader election for the host registry: at most one host grants leases at any time.

The host that last swapped the rendezvous's token is the leader. In each turn the leader reads the
requests of the hosts and computes the new state of the registry. If the state has changed, the
leader writes the state. The leader then swaps the token for its next token, and answers only if the
swap has succeeded. If another host sees the same token for too long, by its own clock, that other
host swaps the token for a token with its own name. The other host is then the leader. The new
leader reads the registry and continues as `Registry.restarted` describes.

The following argument shows that two generations are never active at once. Suppose that a leader
was suspended at any point, that another host took the token at time T, and that the first leader
resumes. If the first leader's swap was before T, then every request that it answers was sent before
T. A host counts its lease from its request, so the lease ends before T + lease, and the new leader
waits until then. The decisions of the first leader were written before the swap, so the new leader
has read them. If the first leader's swap comes after T, the swap fails, and nothing is answered.
Therefore the clocks of two leaders need not agree, and the leader timeout decides only how soon
another host takes over. The argument assumes that the rate of each clock is wrong by `drift` at
most during a lease, even while the machine sleeps (`boot_clock`). A virtual machine that was paused
breaks this assumption; fences protect the run against that case.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxdist.elastic.hosts.rendezvous.contract import NOBODY, Rendezvous, Token
from jaxdist.elastic.membership import Generation, Grant, Registry, Renew, Stop
from jaxdist.heartbeat.config import MembershipConfig
from jaxdist.types import JsonObject

LEADER_TIMEOUT_LEASES = 0.8
"""The time without a heartbeat after which a leader is replaced, in leases."""
STRANGER_TIMEOUT_LEASES = 2 * LEADER_TIMEOUT_LEASES
"""The time without a heartbeat, in leases, after which a host that has not joined yet replaces the
leader. The time is longer than `LEADER_TIMEOUT_LEASES`, so that a host that has joined becomes the
leader first.
"""
FORGET_LEASES = 30
"""The time of silence after which a host's messages are deleted, in leases."""


def boot_clock() -> float:
    """Return the time of a clock that also runs while the machine sleeps, in seconds.

    On a system without such a clock, return the time of `time.monotonic`.
    """
    number = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if number is None else time.clock_gettime(number)


@dataclass
class Term:
    """The state of a leader during its term.

    Attributes:
      token: the token of the leader's last swap.
      registry: the current state of the registry.
      heard: for each host, the number of its last message, and the time at which this message
        arrived.
      saved: the registry in the form in which the leader last wrote it.
      answers: the answers that are sent to hosts after the next swap.
      facts: the facts that each host has published about itself.
      begun: whether the first swap of the term has succeeded.
    """

    token: Token
    registry: Registry
    heard: dict[str, tuple[int, float]] = field(default_factory=dict)
    saved: JsonObject = field(default_factory=dict)
    answers: dict[str, Grant | Stop] = field(default_factory=dict)
    facts: dict[str, JsonObject] = field(default_factory=dict)
    begun: bool = False


class LeaderElection:
    """The part of a single host in the leader election; the host calls `turn` repeatedly.

    Args:
      own: the name of this host.
      compatibility: the properties that hosts must have in common. The leader publishes these
        properties for the hosts that join; see `jaxdist.elastic.hosts.identity`.
      before: the number of the newest generation of the run at earlier rendezvous.
      clock: the function that returns the time of this host's clock, in seconds.
      fits: the function that returns whether hosts can work together, given the facts that each
        host has published.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        config: MembershipConfig,
        own: str,
        compatibility: JsonObject,
        *,
        before: int = 0,
        clock: Callable[[], float] = boot_clock,
        fits: Callable[[Mapping[str, JsonObject]], bool] = lambda facts: True,
    ) -> None:
        self.rendezvous, self.config, self.own = rendezvous, config, own
        self.compatibility = compatibility
        self.before, self.clock, self.fits = before, clock, fits
        self.term: Term | None = None
        self._seen, self._since = "", clock()

    def turn(self) -> None:
        """Become the leader if possible, and answer the requests of hosts if this host leads."""
        if self.term is None:
            self.look()
        if self.term is not None:
            self.collect()
            if self.commit():
                self.answer()

    def look(self, timeout_leases: float = LEADER_TIMEOUT_LEASES) -> None:
        """Take the token if no host holds it, or if its holder has shown no heartbeat for too long.

        Args:
          timeout_leases: the time without a heartbeat after which the holder is replaced, in
            leases.
        """
        text, now = self.rendezvous.token(), self.clock()
        token = Token.parse(text)
        # A change of the token is the heartbeat. This host's clock gives the time of the change,
        # because a time inside the token would be by another clock.
        if text != self._seen:
            self._seen, self._since = text, now
        waited = now - self._since > timeout_leases * self.config.lease_seconds
        if not (waited or token.holder in (NOBODY, self.own)):
            return
        mine = token.taken(self.own)
        if self.rendezvous.compare_and_swap(text, str(mine)):
            self.term = Term(mine, self._read(mine.term))

    def _read(self, number: int) -> Registry:
        """Return the registry from the last term before `number`, or a new registry."""
        found = registry_of(self.rendezvous, number)
        if found is None:
            return Registry(generation=Generation(self.before))
        return found.restarted(self.config, self.clock())

    def collect(self) -> None:
        """Read the requests of all hosts, and compute the answers, which are not sent yet."""
        term = self.term
        assert term is not None
        term.answers = {}
        for host, told in self.rendezvous.values("host"):
            number, now = told["number"], self.clock()
            term.facts[host] = told["facts"]
            before = term.heard.get(host, (None, now))
            if number == before[0]:
                if now - before[1] > FORGET_LEASES * self.config.lease_seconds:
                    self._forget(host)
                continue
            term.heard[host] = number, now
            # The first messages that a new leader reads may come from hosts that left long ago, so
            # the leader does not answer these messages.
            if term.begun:
                given = self.config, now, decode_renewal(told["renew"]), self._fit
                term.registry, term.answers[host] = term.registry.receive(*given)

    def _fit(self, hosts: Sequence[str]) -> bool:
        assert self.term is not None
        facts = self.term.facts
        told = {host: facts[host] for host in hosts if host in facts}
        return len(told) == len(hosts) and self.fits(told)

    def commit(self) -> bool:
        """Write the registry if it has changed, and swap the token.

        Returns:
          Whether the swap succeeded. If it failed, another host has taken the token, and the term
          of this host has ended.
        """
        term = self.term
        assert term is not None
        told = encode_registry(term.registry)
        if told != term.saved or not term.begun:
            number = term.token.term
            # The registry is written before the swap. If another host becomes the leader later,
            # that host therefore reads every decision that this host has sent to other hosts.
            self.rendezvous.put(f"term/{number}", {"card": self.compatibility, "registry": told})
            self.rendezvous.drop_before("term", number - 1)
            term.saved = told
        following = term.token.next()
        if not self.rendezvous.compare_and_swap(str(term.token), str(following)):
            self.term = None
            return False
        term.token, term.begun = following, True
        return True

    def answer(self) -> None:
        """Send the leader's answers to the messages of hosts."""
        term = self.term
        assert term is not None
        for host, message in term.answers.items():
            self.rendezvous.put(f"answer/{host}", encode_answer(message))

    def resign(self) -> None:
        """End the term, so that another host can become the leader at once."""
        term, self.term = self.term, None
        if term is not None:
            # The token is swapped, since a write could replace the token of a host that is already
            # the next leader.
            nobody = Token(term.token.name, term.token.term, NOBODY, term.token.beat + 1)
            self.rendezvous.compare_and_swap(str(term.token), str(nobody))

    def _forget(self, host: str) -> None:
        if self.term is not None:
            self.term.facts.pop(host, None)
        self.rendezvous.drop(f"host/{host}")
        self.rendezvous.drop(f"answer/{host}")


def encode_registry(registry: Registry) -> JsonObject:
    """Return the registry as JSON.

    The times are left out, since only the clock of the leader that writes the registry gives them a
    meaning.

    >>> decode_registry(encode_registry(Registry())) == Registry()
    True
    """
    return {
        "alive": [*registry.alive],
        "number": registry.generation.number,
        "members": [*registry.generation.members],
        "granted": registry.granted,
        "pauses": registry.pauses,
        # This key must not change, since earlier versions wrote the same key.
        "aside": sorted(registry.quarantined),
        "holders": [*registry.holders],
    }


def decode_registry(told: Mapping[str, Any]) -> Registry:
    """Return the registry that `encode_registry` wrote; `Registry.restarted` sets its times."""
    return Registry(
        alive=dict.fromkeys(told["alive"], 0.0),
        generation=Generation(told["number"], tuple(told["members"])),
        granted=told["granted"],
        pauses=told["pauses"],
        quarantined=frozenset(told.get("aside", ())),
        holders=dict.fromkeys(told["holders"], 0.0),
    )


def registry_of(rendezvous: Rendezvous, before: float = math.inf) -> Registry | None:
    """Return the registry that a leader last wrote, or None if there was no leader yet.

    The registry contains no times of this process's clock.

    Args:
      before: the first term whose registry is ignored.

    Raises:
      RendezvousError: the rendezvous cannot be reached.
    """
    terms = [term for term in map(int, rendezvous.names("term")) if term < before]
    told = rendezvous.get(f"term/{max(terms)}") if terms else None
    return None if told is None else decode_registry(told["registry"])


def encode_answer(message: Grant | Stop) -> JsonObject:
    """Return an answer to a host as JSON."""
    if isinstance(message, Stop):
        return {"stop": message.token}
    return {
        "number": message.generation.number,
        "members": [*message.generation.members],
        "sent": message.sent,
        "pauses": message.pauses,
    }


def decode_answer(told: Mapping[str, Any]) -> Grant | Stop:
    """Return the answer that `encode_answer` wrote.

    >>> decode_answer(encode_answer(Stop(4)))
    Stop(token=4)
    """
    if "stop" in told:
        return Stop(told["stop"])
    given = Generation(told["number"], tuple(told["members"]))
    return Grant(given, told["sent"], told["pauses"])


def encode_renewal(message: Renew, number: int, facts: Mapping[str, Any]) -> JsonObject:
    """Return a host's message as JSON.

    Args:
      message: the renewal of the host's lease.
      number: the number of the message.
      facts: the facts that the host publishes for the other hosts.
    """
    renew = asdict(message)
    renew["aside"] = renew.pop("quarantined")
    return {"number": number, "renew": renew, "facts": {**facts}}


def decode_renewal(renew: Mapping[str, Any]) -> Renew:
    """Return the renewal in a message that `encode_renewal` wrote."""
    return Renew(**{"quarantined" if key == "aside" else key: renew[key] for key in renew})


def compatibility_of(rendezvous: Rendezvous) -> tuple[str, JsonObject] | None:
    """Return the token and the published properties of the leader, or None without a leader.

    Raises:
      RendezvousError: the rendezvous cannot be reached.
    """
    text = rendezvous.token()
    token = Token.parse(text)
    told = rendezvous.get(f"term/{token.term}") if token.holder != NOBODY else None
    return None if told is None else (text, told["card"])
