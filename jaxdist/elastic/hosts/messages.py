"""The messages for the user about other hosts: which hosts are missing or lost, and why."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from jaxdist.elastic.assignment import Assignment
from jaxdist.elastic.hosts.leader_election import compatibility_of, registry_of
from jaxdist.elastic.hosts.member import Membership
from jaxdist.elastic.hosts.rendezvous.contract import RendezvousError
from jaxdist.runtime.rendezvous import Wait


@dataclass(frozen=True)
class HostMessages:
    """The messages that one host prints about the other hosts.

    Attributes:
      name: the name of this host for messages.
      seconds: the time for which this host waits for enough hosts, in seconds.
    """

    members: Membership
    name: str
    seconds: float

    def why(self, assignment: Assignment, ends: str) -> str:
        """Return the reason why a generation ended, in the words of the host whose process failed.

        The reason is the failure of the rendezvous, the words that a host has published, or the
        fact that a host leaves. If none of these is known, the reason is `ends`.
        """
        trouble = self.members.trouble
        if trouble is not None:
            return str(trouble)
        # If the rendezvous cannot be reached, the reason of another host is unknown, and the result
        # is `ends`.
        with suppress(RendezvousError):
            for one in self.members.others().values():
                why = one["facts"].get("why")
                if why and why["generation"] == assignment.generation:
                    return why["words"]
                if one["facts"].get("leaving"):
                    return f"{one['facts']['name']} leaves"
        return ends

    def tell_wait(self, wait: Wait) -> None:
        """Print from time to time which hosts are missing, or what prevents a generation."""
        trouble = self.members.trouble
        if trouble is not None:
            wait.tell(f"waiting: {trouble}")
            return
        names, least = self._names(), self.members.config.min_hosts
        if len(names) < least:
            what = f"hosts: {len(names)} of {least} have joined ({', '.join(names)})"
        else:
            what = (
                "the next generation (hosts that are alive or not yet known to be lost: "
                f"{', '.join(names)})"
            )
        wait.tell(f"waiting at {self.members.rendezvous.address} for {what}")

    def too_few(self) -> str:
        """Return the reason why no generation started, with advice to the user."""
        trouble = self.members.trouble
        if trouble is not None:
            return f"{trouble} (tried for {self.seconds:g} s)"
        names = self._names()
        least = self.members.config.min_hosts
        lacking = f"{max(least - len(names), 0)} of {least} hosts are missing"
        return (
            f"no generation began at {self.members.rendezvous.address} within {self.seconds:g} s: "
            f"{lacking}, only {', '.join(names)} joined; start the agents of the missing hosts, "
            "lower --min, or wait longer with --join-timeout SECONDS"
        )

    def _names(self) -> list[str]:
        """Return the names of the hosts that the leader considers alive."""
        with suppress(RendezvousError):
            found = compatibility_of(self.members.rendezvous)
            registry = registry_of(self.members.rendezvous) if found else None
            said = self.members.others()
            if registry is not None:
                here = [host for host in registry.alive if host in said]
                return sorted(said[host]["facts"]["name"] for host in here)
        return [self.name]
