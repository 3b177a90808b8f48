"""How a generation begins: the first host tells who does what, each fetches the state it lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxdist.elastic.hosts.copies import CopyError, fetch, parts_in
from jaxdist.elastic.hosts.leader_election import registry_of
from jaxdist.elastic.hosts.member import Membership
from jaxdist.elastic.hosts.plan import HostFacts, Plan, Rule, make_plan
from jaxdist.elastic.hosts.run import asked_of, run_to_begin
from jaxdist.elastic.hosts.snapshot_replica import SnapshotReplica
from jaxdist.elastic.membership import Generation
from jaxdist.errors import RunError
from jaxdist.runtime.rendezvous import free_port
from jaxdist.types import JsonObject

FULL = "run/full"


@dataclass(frozen=True)
class Preparing:
    """One host's part in it.

    Attributes:
      address: at which the others reach this host.
      token: shared by all hosts.
      values: of the config.
      resume: whether the first generation goes on with a run.
    """

    members: Membership
    address: str
    token: bytes
    values: JsonObject
    say: Callable[[str], None]
    resume: bool

    def tell_plan(self, key: str, generation: Generation) -> RunError | None:
        """The first host's part: who does what; returns why nobody can do anything.

        Raises:
          RendezvousError: it cannot be told.
        """
        said = self.members.others()
        if not said.keys() >= set(generation.members):
            return None  # one is gone already: the registry will see it
        hosts = [HostFacts.of(host, said[host]["facts"]) for host in generation.members]
        registry = registry_of(self.members.rendezvous)
        left_out = (registry.quarantined if registry else frozenset()) - {*generation.members}
        quarantined = [HostFacts.of(host, said[host]["facts"]) for host in left_out & said.keys()]
        rule = self._rule()
        try:
            plan = make_plan(hosts, rule, self.members.config.min_hosts, quarantined)
        except RunError as error:
            return error
        number = generation.number
        if rule.full is None:
            told = {"generation": number, "data": rule.data_size(plan.devices)}
            self.members.rendezvous.put(FULL, told)
        ended = self.members.ended_before
        run = run_to_begin(self.members.rendezvous, ended, number, asked_of(self.values))
        resume = self.resume or run.path is not None
        address = self.address
        port = free_port("127.0.0.1" if address in ("127.0.0.1", "localhost") else "")
        for name in self.members.rendezvous.names("plan"):
            if int(name) < number - 1:
                self.members.rendezvous.drop(f"plan/{name}")
        coordinator = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self.members.rendezvous.put(
            key,
            {
                "plan": asdict(plan),
                "coordinator": coordinator,
                "resume": resume,
                "run": run.plain,
            },
        )
        return None

    def has_mesh(self, facts: Mapping[str, JsonObject]) -> bool:
        """Whether there is a mesh for hosts that have told these facts.

        Raises:
          RendezvousError: what the full mesh was is not known.
        """
        hosts, rule = [HostFacts.of(host, told) for host, told in facts.items()], self._rule()
        try:
            make_plan(hosts, rule, self.members.config.min_hosts)
        except RunError:
            return False
        return True

    def _rule(self) -> Rule:
        full = self.members.rendezvous.get(FULL)
        return Rule.of(self.values, full["data"] if self._of_this_run(full) else None)

    def _of_this_run(self, told: Mapping[str, Any] | None) -> bool:
        """Whether something was told since the last run of this rendezvous ended."""
        return told is not None and told["generation"] > self.members.ended_before

    def collect(self, folder: Path, generation: Generation, plan: Plan) -> SnapshotReplica | None:
        """Fetch what this host lacks of the snapshot, and take away all others.

        Other snapshots are of steps that are taken again, or lack what a lost host had.

        Returns:
          who from now on copies what the host before this one has; None: it is the only one.

        Raises:
          RendezvousError: what the others have is not known.
        """
        said = self.members.others()
        here = set(parts_in(folder))
        for name in here - plan.snapshot.keys():
            (folder / name).unlink(missing_ok=True)
        for name, host in plan.snapshot.items():
            if name in here or host not in said:
                continue
            try:
                fetch(said[host]["facts"]["copies"], name, folder, self.token)
            except CopyError as error:
                self.say(f"no snapshot in memory: {error}")
                break
        self.members.tell(parts=parts_in(folder), why=None)
        at = generation.members.index(self.members.own)
        before = generation.members[at - 1]
        if before == self.members.own or before not in said:
            return None
        first, count = plan.places[before]
        theirs = frozenset(range(first, first + count))
        address = said[before]["facts"]["copies"]
        return SnapshotReplica(address, folder, self.token, theirs, plan.total, self.say)
