"""Who keeps the registry: one host at a time, and never two that grant.

The host that swapped the rendezvous's token last is the keeper. It goes round in turns: it reads
what hosts ask for, works out what the registry then knows, writes that down where it has changed,
swaps the token for its own next one, and only when that has succeeded gives its answers. A host
that sees the same token for too long, by its own clock, swaps it for its own, reads the registry
back, and counts from then on, as `Registry.restarted` has it.

Why no two generations are at work. Say a keeper was stopped at any moment, another took the token
at time T, and the first goes on. If its swap was before T, all that it answers was asked for before
T, and a host counts its lease from when it asked: it ends before T + lease, which the new keeper
waits for. What it decided is written before the swap, so that the new keeper has read it. If its
swap comes after T it fails, and nothing is answered. So no two keepers need clocks that agree, and
how long a keeper is waited for decides nothing but how soon another takes over. Assumed is that
each clock runs too fast or too slow by `drift` at most while a lease lasts, also while the machine
sleeps (`boot_clock`); a virtual machine that was paused breaks that, and is what fences are for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxdist.elastic.hosts.places.contract import NOBODY, Rendezvous, Token
from jaxdist.elastic.membership import Generation, Grant, Registry, Renew, Stop
from jaxdist.heartbeat.config import MembershipConfig
from jaxdist.types import JsonObject

LEADER_TIMEOUT_LEASES = 0.8
"""A keeper that shows no life for so long is followed by another."""
STRANGER_TIMEOUT_LEASES = 2 * LEADER_TIMEOUT_LEASES
"""The same where who looks is not yet one of the hosts: these come first."""
FORGET_LEASES = 30
"""What a host has said is taken away when it has said nothing for so long."""


def boot_clock() -> float:
    """Seconds that also pass while the machine sleeps, where the system counts them."""
    number = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if number is None else time.clock_gettime(number)


@dataclass
class Term:
    """A term of a keeper.

    Attributes:
      token: as it swapped it last.
      heard: by host, the number of its last message, and when it came.
      saved: what was written down of the registry.
      answers: that wait for the swap.
      facts: by host, what it has told of itself.
    """

    token: Token
    registry: Registry
    heard: dict[str, tuple[int, float]] = field(default_factory=dict)
    saved: JsonObject = field(default_factory=dict)
    answers: dict[str, Grant | Stop] = field(default_factory=dict)
    facts: dict[str, JsonObject] = field(default_factory=dict)
    begun: bool = False


class LeaderElection:
    """A host's own part in keeping the registry; `turn` again and again.

    Args:
      own: the name of this host.
      card: what hosts must have alike, for those that come: see `jaxdist.elastic.hosts.identity`.
      before: number of the newest generation of the run in former rendezvous.
      clock: seconds; of this host alone.
      fits: whether hosts, by the facts that each has told, can work together.
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
        """Look who keeps the registry, and keep it where that is this host."""
        if self.term is None:
            self.look()
        if self.term is not None:
            self.collect()
            if self.commit():
                self.answer()

    def look(self, timeout_leases: float = LEADER_TIMEOUT_LEASES) -> None:
        """Take the token where nobody has it, or its holder shows no life.

        Args:
          timeout_leases: for how many leases it may show none.
        """
        text, now = self.rendezvous.token(), self.clock()
        token = Token.parse(text)
        if text != self._seen:
            self._seen, self._since = text, now
        waited = now - self._since > timeout_leases * self.config.lease_seconds
        if not (waited or token.holder in (NOBODY, self.own)):
            return
        mine = token.taken(self.own)
        if self.rendezvous.compare_and_swap(text, str(mine)):
            self.term = Term(mine, self._read(mine.term))

    def _read(self, number: int) -> Registry:
        """What the keepers before have written last."""
        terms = [int(name) for name in self.rendezvous.names("term") if int(name) < number]
        told = self.rendezvous.get(f"term/{max(terms)}") if terms else None
        if told is None:
            return Registry(generation=Generation(self.before))
        return decode(told["registry"]).restarted(self.config, self.clock())

    def collect(self) -> None:
        """Read what hosts ask for, and work out the answers."""
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
            if term.begun:  # what lies there at first may be of hosts that are long gone
                given = self.config, now, decode_renewal(told["renew"]), self._fit
                term.registry, term.answers[host] = term.registry.receive(*given)

    def _fit(self, hosts: Sequence[str]) -> bool:
        assert self.term is not None
        facts = self.term.facts
        told = {host: facts[host] for host in hosts if host in facts}
        return len(told) == len(hosts) and self.fits(told)

    def commit(self) -> bool:
        """Write down what has changed, and swap the token; False: another host has it."""
        term = self.term
        assert term is not None
        told = encode(term.registry)
        if told != term.saved or not term.begun:
            number = term.token.term
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
        """Give the answers of this turn."""
        term = self.term
        assert term is not None
        for host, message in term.answers.items():
            self.rendezvous.put(f"answer/{host}", encode_answer(message))

    def resign(self) -> None:
        """Let the next keeper begin at once."""
        term, self.term = self.term, None
        if term is not None:
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


def encode(registry: Registry) -> JsonObject:
    """What of a registry is written down: all but its clock's times.

    >>> decode(encode(Registry())) == Registry()
    True
    """
    return {
        "alive": [*registry.alive],
        "number": registry.generation.number,
        "members": [*registry.generation.members],
        "granted": registry.granted,
        "pauses": registry.pauses,
        "aside": sorted(registry.quarantined),
        "holders": [*registry.holders],
    }


def decode(told: Mapping[str, Any]) -> Registry:
    """What was written down; to be `restarted`."""
    return Registry(
        alive=dict.fromkeys(told["alive"], 0.0),
        generation=Generation(told["number"], tuple(told["members"])),
        granted=told["granted"],
        pauses=told["pauses"],
        quarantined=frozenset(told.get("aside", ())),
        holders=dict.fromkeys(told["holders"], 0.0),
    )


def registry_of(rendezvous: Rendezvous) -> Registry | None:
    """What a keeper has told of the registry last, without times; None: there was no keeper.

    Raises:
      RendezvousError: the rendezvous cannot be reached.
    """
    terms = rendezvous.names("term")
    told = rendezvous.get(f"term/{max(map(int, terms))}") if terms else None
    return None if told is None else decode(told["registry"])


def encode_answer(message: Grant | Stop) -> JsonObject:
    """An answer as JSON."""
    if isinstance(message, Stop):
        return {"stop": message.token}
    return {
        "number": message.generation.number,
        "members": [*message.generation.members],
        "sent": message.sent,
        "pauses": message.pauses,
    }


def decode_answer(told: Mapping[str, Any]) -> Grant | Stop:
    """What `encode_answer` made.

    >>> decode_answer(encode_answer(Stop(4)))
    Stop(token=4)
    """
    if "stop" in told:
        return Stop(told["stop"])
    given = Generation(told["number"], tuple(told["members"]))
    return Grant(given, told["sent"], told["pauses"])


def encode_renewal(message: Renew, number: int, facts: Mapping[str, Any]) -> JsonObject:
    """What a host says: its renewal, the number of the message, and facts for the other hosts."""
    renew = asdict(message)
    renew["aside"] = renew.pop("quarantined")
    return {"number": number, "renew": renew, "facts": {**facts}}


def decode_renewal(renew: Mapping[str, Any]) -> Renew:
    """The renewal that `encode_renewal` wrote."""
    return Renew(**{"quarantined" if key == "aside" else key: renew[key] for key in renew})


def compatibility_of(rendezvous: Rendezvous) -> tuple[str, JsonObject] | None:
    """The token of the keeper, and its card; None: nobody keeps the registry yet.

    Raises:
      RendezvousError: the rendezvous cannot be reached.
    """
    text = rendezvous.token()
    token = Token.parse(text)
    told = rendezvous.get(f"term/{token.term}") if token.holder != NOBODY else None
    return None if told is None else (text, told["card"])
