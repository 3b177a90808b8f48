"""Leader election for the host registry: at most one host grants leases at any time.

The host that last swapped the rendezvous's token is the leader. In each turn the leader reads the
requests of the hosts, computes the new state of the registry, writes the state if it has changed,
swaps the token for its next token, and answers only if the swap has succeeded. A host that sees the
same token for too long, by its own clock, swaps it for a token of its own, reads the registry back,
and continues from there as `Registry.restarted` describes.

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
"""The time after which a host that has not joined yet replaces a leader, in leases: the hosts that
have joined come first."""
FORGET_LEASES = 30
"""The time of silence after which the messages of a host are deleted, in leases."""


def boot_clock() -> float:
    """Return seconds of a clock that also runs while the machine sleeps, if the system has one."""
    number = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if number is None else time.clock_gettime(number)


@dataclass
class Term:
    """The state of a leader during its term.

    Attributes:
      token: the token of the leader's last swap.
      registry: the current state of the registry.
      heard: the number and the arrival time of each host's last message.
      saved: the registry as the leader last wrote it.
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
    """The election as one host takes part in it; call `turn` repeatedly.

    Args:
      own: the name of this host.
      compatibility: the properties that hosts must have in common, which a leader publishes for
        hosts that join; see `jaxdist.elastic.hosts.identity`.
      before: the number of the newest generation of the run at earlier rendezvous.
      clock: returns seconds, by the clock of this host alone.
      fits: returns whether hosts can work together, given the facts that each host has published.
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
        """Check whether this host is, or can become, the leader; as the leader, answer requests."""
        if self.term is None:
            self.look()
        if self.term is not None:
            self.collect()
            if self.commit():
                self.answer()

    def look(self, timeout_leases: float = LEADER_TIMEOUT_LEASES) -> None:
        """Take the token if no host has the token, or if its holder shows no heartbeat.

        Args:
          timeout_leases: the time without a heartbeat after which the holder is replaced, in
            leases.
        """
        text, now = self.rendezvous.token(), self.clock()
        token = Token.parse(text)
        # A change of the token is the heartbeat, at the time of this host's clock; a time inside
        # the token would be that of another clock.
        if text != self._seen:
            self._seen, self._since = text, now
        waited = now - self._since > timeout_leases * self.config.lease_seconds
        if not (waited or token.holder in (NOBODY, self.own)):
            return
        mine = token.taken(self.own)
        if self.rendezvous.compare_and_swap(text, str(mine)):
            self.term = Term(mine, self._read(mine.term))

    def _read(self, number: int) -> Registry:
        """Read the registry as earlier leaders last wrote it."""
        terms = [int(name) for name in self.rendezvous.names("term") if int(name) < number]
        told = self.rendezvous.get(f"term/{max(terms)}") if terms else None
        if told is None:
            return Registry(generation=Generation(self.before))
        return decode_registry(told["registry"]).restarted(self.config, self.clock())

    def collect(self) -> None:
        """Read the requests of all hosts, and compute the answers."""
        term = self.term
        assert term is not None
        term.answers = {}
        for host in self.rendezvous.names("host"):
            told = self.rendezvous.get(f"host/{host}")
            if told is None:
                continue
            number, now = told["number"], self.clock()
            term.facts[host] = told["facts"]
            before = term.heard.get(host, (None, now))
            if number == before[0]:
                if now - before[1] > FORGET_LEASES * self.config.lease_seconds:
                    self._forget(host)
                continue
            term.heard[host] = number, now
            if term.begun:  # The first messages of a term may come from hosts that left long ago.
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
          Whether the swap succeeded; if not, another host has taken the token, and the term ends.
        """
        term = self.term
        assert term is not None
        told = encode_registry(term.registry)
        if told != term.saved or not term.begun:
            number = term.token.term
            # The write comes before the swap, because a leader that takes the token later must read
            # every decision that was answered.
            self.rendezvous.put(f"term/{number}", {"card": self.compatibility, "registry": told})
            self._drop_terms(number)
            term.saved = told
        following = term.token.next()
        if not self.rendezvous.compare_and_swap(str(term.token), str(following)):
            self.term = None
            return False
        term.token, term.begun = following, True
        return True

    def answer(self) -> None:
        """Send the answers of this turn."""
        term = self.term
        assert term is not None
        for host, message in term.answers.items():
            self.rendezvous.put(f"answer/{host}", encode_answer(message))

    def resign(self) -> None:
        """Give up the term, so that the next leader can start at once."""
        term, self.term = self.term, None
        if term is not None:
            # A plain write could replace the token of a host that has become the leader meanwhile.
            nobody = Token(term.token.name, term.token.term, NOBODY, term.token.beat + 1)
            self.rendezvous.compare_and_swap(str(term.token), str(nobody))

    def _forget(self, host: str) -> None:
        if self.term is not None:
            self.term.facts.pop(host, None)
        self.rendezvous.drop(f"host/{host}")
        self.rendezvous.drop(f"answer/{host}")

    def _drop_terms(self, number: int) -> None:
        for name in self.rendezvous.names("term"):
            if int(name) < number - 1:
                self.rendezvous.drop(f"term/{name}")


def encode_registry(registry: Registry) -> JsonObject:
    """Return the registry as JSON, without times, which only the leader's clock can interpret.

    >>> decode_registry(encode_registry(Registry())) == Registry()
    True
    """
    return {
        "alive": [*registry.alive],
        "number": registry.generation.number,
        "members": [*registry.generation.members],
        "granted": registry.granted,
        "pauses": registry.pauses,
        "aside": sorted(registry.quarantined),  # Stored registries keep this older name of the key.
        "holders": [*registry.holders],
    }


def decode_registry(told: Mapping[str, Any]) -> Registry:
    """Return the registry that `encode` wrote, without times, which `Registry.restarted` sets."""
    return Registry(
        alive=dict.fromkeys(told["alive"], 0.0),
        generation=Generation(told["number"], tuple(told["members"])),
        granted=told["granted"],
        pauses=told["pauses"],
        quarantined=frozenset(told.get("aside", ())),
        holders=dict.fromkeys(told["holders"], 0.0),
    )


def registry_of(rendezvous: Rendezvous) -> Registry | None:
    """Return the registry as a leader last wrote it, without times, or None before any leader.

    Raises:
      RendezvousError: the rendezvous cannot be reached.
    """
    terms = rendezvous.names("term")
    told = rendezvous.get(f"term/{max(map(int, terms))}") if terms else None
    return None if told is None else decode_registry(told["registry"])


def encode_answer(message: Grant | Stop) -> JsonObject:
    """Return an answer as JSON."""
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
    """Return a host's message as JSON: a renewal, a number, and facts for the other hosts."""
    renew = asdict(message)
    renew["aside"] = renew.pop("quarantined")
    return {"number": number, "renew": renew, "facts": {**facts}}


def decode_renewal(renew: Mapping[str, Any]) -> Renew:
    """Return the renewal that `encode_renewal` wrote."""
    return Renew(**{"quarantined" if key == "aside" else key: renew[key] for key in renew})


def compatibility_of(rendezvous: Rendezvous) -> tuple[str, JsonObject] | None:
    """Return the leader's token and its compatibility, or None if there is no leader.

    Raises:
      RendezvousError: the rendezvous cannot be reached.
    """
    text = rendezvous.token()
    token = Token.parse(text)
    told = rendezvous.get(f"term/{token.term}") if token.holder != NOBODY else None
    return None if told is None else (text, told["card"])
