"""How a host becomes one of those that meet, if it is as they are."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxdist.elastic.hosts.copies import CopyServer, address_of, parts_in, seed
from jaxdist.elastic.hosts.identity import check, digest_of
from jaxdist.elastic.hosts.leader_election import STRANGER_TIMEOUT_LEASES, compatibility_of
from jaxdist.elastic.hosts.member import Membership
from jaxdist.elastic.hosts.places.contract import LostError, Token
from jaxdist.errors import RunError
from jaxdist.runtime.rendezvous import Wait
from jaxdist.types import JsonObject

LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Here:
    """What this machine brings.

    Attributes:
      host: a name that no other agent has.
      name: for people.
      address: at which the other hosts reach it.
      processes: that it starts, each with so many `devices`.
      token: shared by all hosts.
    """

    host: str
    name: str
    address: str
    processes: int
    devices: int
    token: bytes


def join(
    members: Membership,
    here: Here,
    compatibility: JsonObject,
    snapshots: Path,
    local: Path | None,
    wait: Wait,
) -> CopyServer:
    """Become one of the hosts; returns what hands out this one's snapshots to the others.

    Args:
      card: what all hosts must have alike, see `jaxdist.elastic.hosts.identity`.
      local: with snapshots that this machine's disk has; None: there are none.

    Raises:
      ConfigError: this host differs from those that are there.
      RunError: nobody keeps the registry, or the rendezvous was made anew.
    """
    meet(members, compatibility, wait)
    server = CopyServer(snapshots, here.token, here.address)
    facts = asdict(here)
    del facts["host"], facts["token"]
    if local is not None:
        seed(local, snapshots)
    copies, parts = address_of(here.address, server.port), parts_in(snapshots)
    members.facts = {**facts, "copies": copies, "parts": parts, "why": None}
    members.begin()
    return server


def meet(members: Membership, compatibility: JsonObject, wait: Wait) -> None:
    """Find the registry's keeper, and compare; or keep it."""
    first: str | None = None
    while not wait.over:
        if digest_of(Token.parse(members.rendezvous.token()).name) != compatibility["rendezvous"]:
            raise LostError(members.rendezvous.address)
        members.election.look(STRANGER_TIMEOUT_LEASES)
        if members.election.term is not None:
            return
        found = compatibility_of(members.rendezvous)
        if found is not None and first not in (None, found[0]):  # its keeper lives
            check(compatibility, found[1], members.rendezvous.address)
            return
        first = first if found is None or first is not None else found[0]
        time.sleep(LOOK_SECONDS)
    raise RunError(
        f"nobody keeps the registry at {members.rendezvous.address}, and it cannot be taken: "
        f"tried for {wait.seconds:g} s"
    )
