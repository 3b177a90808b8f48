"""The admission of a host to a run, if the host is compatible with the other hosts."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxdist.elastic.hosts.copies import CopyServer, parts_in, seed
from jaxdist.elastic.hosts.identity import check_compatibility, digest_of
from jaxdist.elastic.hosts.leader_election import STRANGER_TIMEOUT_LEASES, compatibility_of
from jaxdist.elastic.hosts.member import Membership
from jaxdist.elastic.hosts.rendezvous.contract import LostError, Token
from jaxdist.errors import RunError
from jaxdist.runtime.rendezvous import Wait
from jaxdist.types import JsonObject
from jaxdist.wire.ports import address_of

LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Here:
    """The identity and the resources of this machine, as the other hosts see them.

    Attributes:
      host: a name that no other agent has.
      name: the name of the machine for messages.
      address: the address at which the other hosts reach this machine.
      processes: the number of processes that the machine starts.
      devices: the number of devices of each process.
      token: the token that all hosts share.
    """

    host: str
    name: str
    address: str
    processes: int
    devices: int
    token: bytes


def join_hosts(
    members: Membership,
    here: Here,
    compatibility: JsonObject,
    snapshots: Path,
    local: Path | None,
    wait: Wait,
) -> CopyServer:
    """Join the other hosts, and return the server that sends this host's snapshots to them.

    Args:
      compatibility: the properties that all hosts must have in common; see
        `jaxdist.elastic.hosts.identity`.
      snapshots: the folder in memory from which the server sends parts of snapshots.
      local: the folder on this machine's disk that has snapshots, or None if there is no such
        folder.
      wait: the wait for a leader, which has a time limit.

    Raises:
      ConfigError: this host is not compatible with the other hosts.
      RunError: no leader was found in time, or the rendezvous was recreated.
    """
    _meet(members, compatibility, wait)
    server = CopyServer(snapshots, here.token, here.address)
    facts = asdict(here)
    del facts["host"], facts["token"]
    if local is not None:
        seed(local, snapshots)
    copies, parts = address_of(here.address, server.port), parts_in(snapshots)
    members.facts = {**facts, "copies": copies, "parts": parts, "why": None}
    members.begin()
    return server


def _meet(members: Membership, compatibility: JsonObject, wait: Wait) -> None:
    """Find the leader and check the compatibility of this host with it, or become the leader."""
    first: str | None = None
    while not wait.over:
        if digest_of(Token.parse(members.rendezvous.token()).name) != compatibility["rendezvous"]:
            raise LostError(members.rendezvous.address)
        members.election.look(STRANGER_TIMEOUT_LEASES)
        if members.election.term is not None:
            return
        found = compatibility_of(members.rendezvous)
        # A live leader renews its record at the rendezvous. If the record has changed since this
        # host first read it, the leader is alive. This host compares itself only with a live
        # leader.
        if found is not None and first not in (None, found[0]):
            check_compatibility(compatibility, found[1], members.rendezvous.address)
            return
        first = first if found is None or first is not None else found[0]
        time.sleep(LOOK_SECONDS)
    raise RunError(
        f"no host is the leader at {members.rendezvous.address}, and this host could not "
        f"become the leader within {wait.seconds:g} s. Check that all hosts can read and write the "
        "rendezvous"
    )
