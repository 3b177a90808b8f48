"""The hosts of a run on several machines, each with an agent: see `jaxdist.elastic.assignment`.

The registry decides which hosts form a generation, and in which order. The first host plans the
work of each host (`jaxdist.elastic.hosts.plan`) and publishes the plan at the rendezvous. The plan
names the newest snapshot of which the hosts together have all parts. Each host fetches the parts of
this snapshot that it lacks, and then starts its processes. The rendezvous holds these values:

    host/HOST      a host's message: its renewal, and facts (name, address, parts of snapshots ...)
    answer/HOST    the leader's answer to a host
    term/N         the registry and the required properties of hosts, by the leader of term N
    plan/N         the task of each host in generation N
    run/...        the identity and the end of the run: see `jaxdist.elastic.hosts.run`
    run/full       the number of devices in the first generation
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxdist.checkpoint.identity import Identity
from jaxdist.elastic.assignment import Assignment, Hosts
from jaxdist.elastic.hosts.copies import CopyServer, parts_in
from jaxdist.elastic.hosts.join import LOOK_SECONDS, Here, join_hosts
from jaxdist.elastic.hosts.leader_election import LeaderElection, boot_clock
from jaxdist.elastic.hosts.member import Membership
from jaxdist.elastic.hosts.messages import HostMessages
from jaxdist.elastic.hosts.plan import GenerationPlan
from jaxdist.elastic.hosts.prepare import Preparing
from jaxdist.elastic.hosts.remote_progress import RemoteProgress, encode_progress
from jaxdist.elastic.hosts.rendezvous.contract import Rendezvous, RendezvousError
from jaxdist.elastic.hosts.run import (
    command_of,
    ended_before,
    finished,
    known_run,
    requested_directory,
    tell_run,
)
from jaxdist.elastic.hosts.snapshot_replica import SnapshotReplica
from jaxdist.elastic.hosts.standby import Standby
from jaxdist.elastic.membership import Generation
from jaxdist.errors import ConfigError, RunError
from jaxdist.heartbeat.config import MembershipConfig
from jaxdist.heartbeat.run_folder import RunFolder
from jaxdist.heartbeat.status import Status
from jaxdist.types import JsonObject

END_SECONDS = 120.0
"""The time, in seconds, that a host waits for the end of the run after its processes ended well."""
GROWS = "a host came"


class MultiHost(Hosts):
    """The hosts of a run on several machines; see `jaxdist.elastic.assignment.Hosts`.

    Args:
      compatibility: the properties that all hosts must have in common; see
        `jaxdist.elastic.hosts.identity`.
      values: the values of the config.
      seconds: the time to wait for enough hosts, in seconds.
      resume: whether the first generation continues a saved run.
      before: the number of the newest generation of the run at earlier rendezvous.
      local: the function that returns the folder with a run's snapshots on this machine's disk, or
        None if the config keeps no snapshots on disk.
      clock: the function that returns the time of this host's clock, in seconds.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        config: MembershipConfig,
        here: Here,
        compatibility: JsonObject,
        values: JsonObject,
        say: Callable[[str], None],
        *,
        seconds: float,
        resume: bool,
        before: int = 0,
        local: Callable[[Identity | None], Path | None] | None = None,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._local = local if resume else None
        self.rendezvous, self.config, self.here = rendezvous, config, here
        self.compatibility = compatibility
        self.say, self.seconds = say, seconds
        # The lambda delays the access to `_preparing`. That attribute is built last, since it needs
        # the membership, and the membership needs the election.
        told = {"before": before, "clock": clock, "fits": lambda f: self._preparing.has_mesh(f)}
        election = LeaderElection(rendezvous, config, here.host, compatibility, **told)
        self.members = Membership(rendezvous, config, here.host, election, clock)
        self._command, self._asked = command_of(values), requested_directory(values)
        self._values = values
        self._in_part = bool((values.get("checkpoint") or {}).get("parts"))
        self._messages = HostMessages(self.members, here.name, seconds)
        given = (here.address, here.token, values, say, resume)
        self._preparing = Preparing(self.members, *given)
        self._server: CopyServer | None = None
        self._replica: SnapshotReplica | None = None
        self._path_known, self._looked, self._newest = False, 0.0, 0
        self._run_folder: RunFolder | None = None
        self._remote: RemoteProgress | None = None

    def begin(self, folder: Path, stopped: Callable[[], bool]) -> Assignment | None:
        """Wait for the next generation that includes this host.

        The result is None if the run is over, or if `stopped` returned True.
        """
        run_folder, standby = RunFolder(folder, 0), Standby(self.members, self._messages, self.say)
        if self._server is None:
            if self._has_finished():
                return None
            folders = run_folder.snapshots, self._local_folder()
            self._server = join_hosts(
                self.members, self.here, self.compatibility, *folders, standby.wait
            )
        while not stopped():
            over = self.members.over
            if over is not None:
                return self._told_over(over)
            generation = self.members.take()
            if generation is not None:
                standby.taken(generation)
                # The error is ignored, since this loop tries again, and the membership ends the
                # wait if the rendezvous never answers.
                with suppress(RendezvousError):
                    assignment = self._begin(run_folder, generation)
                    if assignment is not None:
                        return assignment
                self.members.release()
            standby.look()
            time.sleep(LOOK_SECONDS)
        return None

    def ends(self, assignment: Assignment) -> str | None:
        """Return the reason why the processes must end, or None if they may continue."""
        now = time.monotonic()
        if not self._path_known and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._pass_path(assignment)
        over = self.members.over
        if over is not None:
            # If the run ended well on another host, the processes of this host will soon end by
            # themselves.
            ended_well = over["code"] == 0 and assignment.count
            return None if ended_well else over["words"] or "the run is over"
        # A run cannot resume from a checkpoint that lacks parts of the state. The processes are
        # therefore ended without a save, and the next generation continues from the newest
        # snapshot.
        if self._in_part and self.members.pauses:
            return GROWS
        ends = self.members.ends()
        return None if ends is None else self._messages.why(assignment, ends)

    def pauses(self, assignment: Assignment) -> bool:
        """Return whether all processes must save and stop.

        The result is always False if checkpoints lack parts of the state.
        """
        return not self._in_part and self.members.pauses

    def release(self, assignment: Assignment, why: str = "", *, stuck: bool = False) -> None:
        """Report that all processes have ended; the registry may start the next generation."""
        assert self._run_folder is not None
        if self._replica is not None:
            self._replica.close()
            self._replica = None
        told = {"generation": assignment.generation, "words": f"{self.here.name}: {why}"}
        parts = parts_in(self._run_folder.snapshots)
        self.members.tell(parts=parts, why=told if why else None)
        self.members.release(stuck=stuck)

    def over(self, assignment: Assignment) -> bool:
        """Return whether the run has taken its last step, as opposed to a stop on request."""
        assert self._run_folder is not None
        if not RunFolder(self._run_folder.folder, assignment.generation).done.exists():
            return False
        if assignment.first == 0:
            run = self._run_folder.known_run()
            told = None if run is None else run.plain
            self.members.finish(assignment.generation, 0, run=told, command=self._command)
            return True
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            if self.members.over is not None:
                return self.members.over["code"] == 0
            if self.members.ends() is not None:
                return False
            time.sleep(LOOK_SECONDS)
        return False

    def tell(self, assignment: Assignment, statuses: Sequence[Status], now: float) -> None:
        """Publish the progress of this host's processes with the host's next message."""
        self.members.note(progress=encode_progress(assignment.generation, statuses, now))

    def remote_progress(self, assignment: Assignment) -> Sequence[Status] | None:
        """Return the progress that other hosts have published, read at most once a second.

        The result is None while the status of any process is unknown.
        """
        now = time.monotonic()
        if self._remote is None or self._remote.generation != assignment.generation:
            count = assignment.total - assignment.count
            self._remote = RemoteProgress(self.here.host, assignment.generation, count)
        if self._remote.due(now):
            # No error is raised here: the membership notices a rendezvous that does not answer, and
            # ends the generation when the lease expires.
            with suppress(RendezvousError):
                self._remote.read(self.members.others(), now)
        return self._remote.statuses

    def uncopied(self) -> str | None:
        """Return why this host does not copy the previous host's snapshots, or None if it does."""
        return None if self._replica is None else self._replica.failure

    def why(self, assignment: Assignment) -> str:
        """Return why the processes stopped, and name the leaving host if it is known."""
        return self._messages.why(
            assignment, GROWS if self.members.pauses else "a host was asked to stop"
        )

    def named(self) -> dict[str, str]:
        """Return the name of this host, as a field of a journal event."""
        return {"host": self.here.name}

    def leave(self) -> None:
        """Announce at once that this host leaves, so that the other hosts know why to stop."""
        self.members.tell(leaving=True)
        # If this message is lost, the next renewal of the lease sends the same facts.
        with suppress(RendezvousError):
            self.members.say()

    def fail(self, code: int, words: str) -> None:
        """Announce to all hosts that the run cannot continue."""
        with suppress(RendezvousError):
            self.members.finish(self._newest, code, f"{self.here.name}: {words}")

    def close(self) -> None:
        """Leave the run and release all resources."""
        if self._replica is not None:
            self._replica.close()
        if self._server is not None:
            self.members.close()
            self._server.close()

    def _begin(self, run_folder: RunFolder, generation: Generation) -> Assignment | None:
        """Start a generation, and return this host's assignment.

        Returns:
          The assignment, or None if the generation or the run has ended meanwhile.
        """
        self._newest = generation.number
        key = f"plan/{generation.number}"
        if generation.coordinator == self.here.host:
            problem = self._preparing.tell_plan(key, generation)
            if problem is not None:
                self.fail(ConfigError.exit_code, str(problem))
        told = None
        while told is None:
            if self.members.ends() is not None or self.members.over is not None:
                return None
            told = self.rendezvous.get(key)
            if told is None:
                time.sleep(LOOK_SECONDS)
        plan = GenerationPlan(**told["plan"])
        first, count = plan.places[self.here.host]
        self._run_folder, self._path_known = run_folder, False
        self._replica = self._preparing.collect(run_folder.snapshots, generation, plan)
        if first == 0:
            settings = f" with {', '.join(plan.settings)}" if plan.settings else ""
            waits = f"; hosts that wait in reserve: {', '.join(plan.idle)}" if plan.idle else ""
            self.say(
                f"generation {generation.number}: {plan.hosts} hosts, "
                f"{plan.total} processes{settings}{waits}"
            )
        # The numbers of generations at two rendezvous cannot be compared, so the fence is the name
        # of the rendezvous.
        fence = hashlib.sha256(self.members.name.encode()).hexdigest()[:16]
        coordinator = told["coordinator"] if plan.total > 1 else None
        given = (generation.number, first, count, plan.total, coordinator, told["resume"])
        return Assignment(*given, Identity.of(told["run"]), plan.settings, fence)

    def _has_finished(self) -> bool:
        """Return whether the run has already finished; if so, print how to train longer."""
        run = finished(self.rendezvous, self._values)
        if run is None:
            return False
        self.say(
            f"run {run.path} of the rendezvous {self.rendezvous.address} has finished, so nothing "
            "is trained. To train another run, choose another --rendezvous; to train this run "
            "longer, use --resume with a larger train.steps"
        )
        return True

    def _local_folder(self) -> Path | None:
        """Return the folder of the run's snapshots on this machine's disk.

        The result is None if the config keeps no snapshots on disk, or if no folder is found.
        """
        if self._local is None:
            return None
        ended = ended_before(self.rendezvous)
        return self._local(known_run(self.rendezvous, ended, self._asked))

    def _pass_path(self, assignment: Assignment) -> None:
        """Pass the path of the run directory from process 0, which creates it, to all agents."""
        assert self._run_folder is not None
        with suppress(RendezvousError):
            if assignment.first == 0:
                run = self._run_folder.known_run()
                if run is not None:
                    tell_run(self.rendezvous, assignment.generation, run, self._asked)
            else:
                run = known_run(self.rendezvous, assignment.generation - 1, self._asked)
                if run is not None:
                    self._run_folder.tell_run(run)
            self._path_known = run is not None

    def _told_over(self, over: Mapping[str, Any]) -> None:
        if over["code"] == ConfigError.exit_code:
            raise ConfigError(over["words"])
        if over["code"]:
            raise RunError(over["words"])
