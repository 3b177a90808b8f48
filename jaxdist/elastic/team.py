"""The processes of a generation on this machine, which are watched until the generation ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from jaxdist.elastic.assignment import Assignment, Hosts
from jaxdist.elastic.members import Member
from jaxdist.elastic.watch import Stuck, StuckTimeouts, find_stuck, first_lost
from jaxdist.errors import STOPPED
from jaxdist.heartbeat.flight.recorder import Recorder
from jaxdist.heartbeat.journal import Journal
from jaxdist.heartbeat.run_folder import RunFolder
from jaxdist.heartbeat.saving import RECOVERY
from jaxdist.heartbeat.status import Status, read_status
from jaxdist.metrics.account import Activity
from jaxdist.runtime.children import how_ended

POLL_SECONDS, LOOK_SECONDS = 0.05, 0.25
"""POLL_SECONDS: the time between two checks for processes that have ended.
LOOK_SECONDS: the time between two reads of the processes' statuses while the generation takes
steps.
"""
END_SECONDS = 120.0
"""The time, in seconds, that processes may take to end after a process has ended well, or after all
were asked to stop.
"""
STACK_SECONDS, STACK_LINES = 0.5, 200


@dataclass(frozen=True)
class Failure:
    """The reason why a generation cannot continue.

    Attributes:
      process: the number of the failed process, or None if no process of this machine failed.
      how: the kind of failure, as a phrase that follows the name of the process in a sentence.
      words: the last lines that the process printed.
      code: the exit code of the process, or None if the process is alive but stuck.
    """

    process: int | None
    how: str
    words: str = ""
    code: int | None = None

    @property
    def named(self) -> str:
        """The process and its failure in words, or an empty text if no process failed."""
        return "" if self.process is None else f"process {self.process} {self.how}"


@dataclass
class Marks:
    """The times at which a generation reached its milestones, in seconds of `time.monotonic`.

    Attributes:
      begun: the time when the agent began to watch the processes, just after their start.
      reached: the times at which all processes had published a status, had restored the state, and
        had finished the first new step. A time is added when the milestone is reached.
    """

    begun: float
    reached: list[float] = field(default_factory=list)

    @property
    def stepped(self) -> bool:
        """Whether all processes have finished the first new step."""
        return len(self.reached) == 3

    def look(self, statuses: Sequence[Status], count: int, first_step: int) -> None:
        """Record the milestones that the processes have reached since the last call.

        Args:
          count: the number of processes that must report.
          first_step: the first new step.
        """
        # `statuses` lacks processes that have not reported yet. A milestone is reached only when
        # the slowest process has reached it.
        up = 0 < count <= len(statuses)
        restored = up and all(one.phase not in _BEFORE for one in statuses)
        stepped = restored and min(one.step for one in statuses) >= first_step
        for _ in range(len(self.reached), up + restored + stepped):
            self.reached.append(time.monotonic())

    def seconds(self, lost_at: float | None) -> dict[str, float]:
        """Return the seconds of each part of the start; the first new step must already be done.

        Args:
          lost_at: the time when the previous generation failed, or None for the first generation.
        """
        assert self.stepped
        times = [self.begun if lost_at is None else lost_at, self.begun, *self.reached]
        spans = zip(RECOVERY, pairwise(times), strict=True)
        return {f"{part}_seconds": end - begin for part, (begin, end) in spans}


_BEFORE = frozenset({Activity.START, Activity.RECOVERY})


@dataclass
class Team:
    """The processes of a generation, for one call of `watch` and then a call of `kill`.

    Attributes:
      newest: the last step that any process of the run has finished.
      stop_reason: the function that returns the reason why this machine has to stop, or None if it
        need not stop.
      stopped: whether a process saved and stopped before the end of the run, on request.
    """

    run_folder: RunFolder
    assignment: Assignment
    members: Sequence[Member]
    stuck_timeouts: StuckTimeouts
    hosts: Hosts
    journal: Journal
    recorder: Recorder
    newest: int
    stop_reason: Callable[[], str | None]
    stopped: bool = False
    _passed: bool = field(default=False, init=False)
    _left: bool = field(default=False, init=False)
    _uncopied: str | None = field(default=None, init=False)

    def kill(self) -> None:
        """End all processes; return when they are gone."""
        for member in self.members:
            member.kill()

    def watch(self, lost_at: float | None) -> Failure | None:
        """Wait until the generation ends, and return its failure, or None if there was no failure.

        Args:
          lost_at: the time when the previous generation failed, in seconds of `time.monotonic`, or
            None for the first generation.
        """
        try:
            return self._watch(lost_at)
        finally:
            # The statuses are read once more, because steps and requests may have been reported
            # since `_watch` last read them.
            self._statuses([None] * len(self.members))
            self._leave()
            self._note_copies()

    def _watch(self, lost_at: float | None) -> Failure | None:
        marks, first = Marks(time.monotonic()), max(self.newest + 1, 1)
        over, begun, look_at = None, False, 0.0
        while True:
            time.sleep(POLL_SECONDS)
            # The clock is read before the exit codes. A process that ends between the two reads
            # then does not count as silent.
            now = time.monotonic()
            looks = not begun or now >= look_at
            if looks:
                self._pass_on(grows=begun)
            ended = self.hosts.ends(self.assignment)
            if ended is not None:
                return Failure(None, ended)
            codes = [self._ended(member) for member in self.members]
            lost = first_lost(codes)
            if lost is not None:
                return self._lost(lost, codes[lost])
            # `all` is true for an empty list, but a host without processes must wait until it is
            # asked to stop.
            if all(code == 0 for code in codes) and (codes or self._passed):
                return None
            if 0 in codes or self._passed:
                over = over or time.monotonic() + END_SECONDS
            if over is not None and time.monotonic() > over:
                late = self.members[codes.index(None)].index
                return Failure(late, f"did not end within {END_SECONDS:g} s after the others")
            # Exit codes are read in every iteration, since this takes little time. Statuses are in
            # files, and are read less often.
            if not looks:
                continue
            look_at = now + LOOK_SECONDS
            statuses = self._statuses(codes)
            marks.look(statuses, len(codes), first)
            if marks.stepped and not begun:
                begun = True
                pids = [one.pid for one in statuses]
                self.journal.add(self.run_folder, "begun", pids=pids, **marks.seconds(lost_at))
                self.recorder.begun()
            self._note_copies()
            self.recorder.look(self.run_folder, statuses)
            self.hosts.tell(self.assignment, statuses, now)
            stuck = find_stuck(
                statuses,
                now,
                self.stuck_timeouts,
                lambda: self.hosts.remote_progress(self.assignment),
            )
            if stuck is not None:
                return self._stuck(stuck, statuses)

    def _lost(self, at: int, code: int | None) -> Failure:
        assert code is not None
        member = self.members[at]
        return Failure(member.index, f"ended ({how_ended(code)})", member.last_words(), code)

    def _ended(self, member: Member) -> int | None:
        """Return the exit code of a process, or None while the process runs.

        A process that saved and stopped on request has the code 0.
        """
        code = member.poll()
        self.stopped = self.stopped or code == STOPPED
        return 0 if code == STOPPED else code

    def _pass_on(self, *, grows: bool) -> None:
        """Pass a request to stop to all processes, once.

        Args:
          grows: whether to pass on a stop that the registry requests so that more hosts can join.
            False means that there are no new steps to save, so a restart would only cost time.
        """
        self._leave()
        pauses = grows and bool(self.members) and self.hosts.pauses(self.assignment)
        if not self._passed and (self._left or pauses):
            self._passed = True
            for member in self.members:
                member.send_signal(signal.SIGTERM)

    def _leave(self) -> None:
        """Announce to the other hosts, once, that this machine was asked to stop."""
        if not self._left and self.stop_reason() is not None:
            self._left = True
            self.hosts.leave()

    def _note_copies(self) -> None:
        """Record in the journal that copies of snapshots begin to fail or succeed again."""
        why, before = self.hosts.uncopied(), self._uncopied
        if (why is None) != (before is None):
            event = "copied" if why is None else "uncopied"
            self.journal.add(self.run_folder, event, why=why or before, **self.hosts.named())
        self._uncopied = why

    def _statuses(self, codes: Sequence[int | None]) -> list[Status]:
        found = (
            read_status(self.run_folder.status(self.assignment.first + index))
            for index, code in enumerate(codes)
            if code is None
        )
        statuses = [one for one in found if one is not None]
        # The process with the newest step may be lost, but `newest` must not decrease.
        self.newest = max([self.newest, *(one.step for one in statuses)])
        return statuses

    def _stuck(self, stuck: Stuck, statuses: Sequence[Status]) -> Failure:
        """Make all processes print stacks, record what each process did, and return the failure."""
        for member in self.members:
            # faulthandler prints the stacks even if Python is blocked in a collective.
            member.send_signal(signal.SIGUSR2)
        # The processes write the stacks to their logs, and do not report when they have done so.
        time.sleep(STACK_SECONDS)
        stacks = {str(member.index): member.last_words(STACK_LINES) for member in self.members}
        now = time.monotonic()
        at = [
            {
                "process": one.process,
                "step": one.step,
                "phase": str(one.phase),
                "for_seconds": now - one.since,
                "silent_seconds": now - one.alive,
            }
            for one in statuses
        ]
        event = {"process": stuck.process, **self.hosts.named(), "processes": at, "stacks": stacks}
        self.journal.add(self.run_folder, "stuck", **event)
        return Failure(stuck.process, stuck.why)
