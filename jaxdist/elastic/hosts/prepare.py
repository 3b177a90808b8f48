"""The start of a generation: the first host publishes a plan, and all hosts fetch missing state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxdist.elastic.hosts.copies import CopyError, fetch, parts_in
from jaxdist.elastic.hosts.leader_election import registry_of
from jaxdist.elastic.hosts.member import Membership
from jaxdist.elastic.hosts.plan import BatchRule, GenerationPlan, HostFacts, make_plan
from jaxdist.elastic.hosts.run import requested_directory, run_to_begin
from jaxdist.elastic.hosts.snapshot_replica import SnapshotReplica
from jaxdist.elastic.membership import Generation
from jaxdist.errors import RunError
from jaxdist.runtime.rendezvous import free_port
from jaxdist.types import JsonObject
from jaxdist.wire.ports import address_of

FULL = "run/full"


@dataclass(frozen=True)
class Preparing:
    """The steps with which a host takes part in the start of a generation.

    Attributes:
      address: the address at which the other hosts reach this host.
      token: the token that all hosts share.
      values: the values of the config.
      resume: whether the first generation continues a saved run.
    """

    members: Membership
    address: str
    token: bytes
    values: JsonObject
    say: Callable[[str], None]
    resume: bool

    def tell_plan(self, key: str, generation: Generation) -> RunError | None:
        """Publish the plan of a generation, on its first host.

        Return the error if no plan exists, or None otherwise. If a member has left, no plan is
        published and the result is None, since the registry then ends the generation.

        Raises:
          RendezvousError: the plan cannot be published.
        """
        said = self.members.others()
        if not said.keys() >= set(generation.members):
            return None  # A member has left; the registry will end this generation.
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
        run = run_to_begin(self.members.rendezvous, ended, number, requested_directory(self.values))
        resume = self.resume or run.path is not None
        address = self.address
        port = free_port("127.0.0.1" if address in ("127.0.0.1", "localhost") else "")
        self.members.rendezvous.drop_before("plan", number - 1)
        own = {"coordinator": address_of(address, port), "resume": resume, "run": run.plain}
        self.members.rendezvous.put(key, {"plan": asdict(plan), **own})
        return None

    def has_mesh(self, facts: Mapping[str, JsonObject]) -> bool:
        """Return whether hosts can form a mesh, from the facts that they have published.

        Raises:
          RendezvousError: the full mesh cannot be read.
        """
        hosts, rule = [HostFacts.of(host, told) for host, told in facts.items()], self._rule()
        try:
            make_plan(hosts, rule, self.members.config.min_hosts)
        except RunError:
            return False
        return True

    def _rule(self) -> BatchRule:
        full = self.members.rendezvous.get(FULL)
        # A size that was written before the end of an earlier run belongs to that run.
        if full is not None and full["generation"] <= self.members.ended_before:
            full = None
        return BatchRule.of(self.values, full and full["data"])

    def collect(
        self, folder: Path, generation: Generation, plan: GenerationPlan
    ) -> SnapshotReplica | None:
        """Fetch the parts of the plan's snapshot that this host lacks, and delete all other parts.

        The deleted parts belong to steps that will be repeated, or to snapshots that lost parts
        with a host.

        Returns:
          The replica of the snapshots of the host before this host, or None if there is no other
          host, or if the message of that host is missing.

        Raises:
          RendezvousError: the messages of the other hosts cannot be read.
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
                break  # The snapshot is incomplete, so its other parts are useless.
        self.members.tell(parts=parts_in(folder), why=None)
        at = generation.members.index(self.members.own)
        before = generation.members[at - 1]
        if before == self.members.own or before not in said:
            return None
        first, count = plan.places[before]
        theirs = frozenset(range(first, first + count))
        address = said[before]["facts"]["copies"]
        return SnapshotReplica(address, folder, self.token, theirs, plan.total, self.say)
