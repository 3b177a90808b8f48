"""The processes of one generation on this machine, watched until it is over."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxdist.elastic.assignment import Assignment, Hosts
from jaxdist.elastic.members import Member, how_ended
from jaxdist.elastic.watch import Stuck, StuckTimeouts, find_stuck, first_lost
from jaxdist.errors import STOPPED
from jaxdist.heartbeat.flight.recorder import Recorder
from jaxdist.heartbeat.journal import Journal
from jaxdist.heartbeat.run_folder import RunFolder
from jaxdist.heartbeat.status import Status, read_status
from jaxdist.metrics.account import Kind

POLL_SECONDS, LOOK_SECONDS = 0.05, 0.25
"""Between two looks at who lives, and once a generation takes steps, at what they say."""
END_SECONDS = 120.0
"""For so long others may go on when one process has ended well, or all were told to stop."""
STACK_SECONDS, STACK_LINES = 0.5, 200


@dataclass(frozen=True)
class Failure:
    """Why a generation cannot go on.

    Attributes:
      process: its number among those of this machine; None where none of them was lost, and the
        generation ended elsewhere.
      code: of the exit; None where the process lives and is stuck.
    """

    process: int | None
    how: str
    words: str = ""
    code: int | None = None


@dataclass
class Marks:
    """When a generation did what for the first time, in seconds of `time.monotonic`."""

    begun: float
    up: float | None = None
    restored: float | None = None
    stepped: float | None = None

    def look(self, statuses: Sequence[Status], count: int, first_step: int) -> None:
        """Note what is new."""
        now = time.monotonic()
        if not count or len(statuses) < count:
            return
        self.up = self.up or now
        if self.restored is None and all(one.phase not in _BEFORE for one in statuses):
            self.restored = now
        if self.stepped is None and min(one.step for one in statuses) >= first_step:
            self.stepped = now

    def seconds(self, lost_at: float | None) -> dict[str, float]:
        """The parts of a beginning, when all of it is known.

        Args:
          lost_at: when the generation before was lost; None: there was none.
        """
        assert self.up is not None
        assert self.restored is not None
        assert self.stepped is not None
        return {
            "stop_seconds": 0.0 if lost_at is None else self.begun - lost_at,
            "restart_seconds": self.up - self.begun,
            "restore_seconds": self.restored - self.up,
            "first_step_seconds": self.stepped - self.restored,
        }


_BEFORE = frozenset({Kind.START, Kind.RECOVERY})


@dataclass
class Team:
    """Processes that were told to begin; `watch` once, then `kill`.

    Attributes:
      newest: the last step that any process of the run has seen.
      told: what ends this machine's part, if something does.
      stopped: whether a process has saved and stopped before the run's end, as it was told.
    """

    run_folder: RunFolder
    assignment: Assignment
    members: Sequence[Member]
    stuck_timeouts: StuckTimeouts
    hosts: Hosts
    journal: Journal
    recorder: Recorder
    newest: int
    told: Callable[[], str | None]
    stopped: bool = False
    _passed: bool = field(default=False, init=False)
    _left: bool = field(default=False, init=False)
    _uncopied: str | None = field(default=None, init=False)

    def kill(self) -> None:
        """End all processes; returns when they are gone."""
        for member in self.members:
            member.kill()

    def watch(self, lost_at: float | None) -> Failure | None:
        """Until it has ended well (None), or cannot go on.

        Args:
          lost_at: when the generation before was lost, in seconds of `time.monotonic`.
        """
        try:
            return self._watch(lost_at)
        finally:  # all may have happened since the last look
            self._statuses([None] * len(self.members))
            self._leave()
            self._note_copies()

    def _watch(self, lost_at: float | None) -> Failure | None:
        marks, first = Marks(time.monotonic()), max(self.newest + 1, 1)
        over, told, look_at = None, False, 0.0
        while True:
            time.sleep(POLL_SECONDS)
            now = time.monotonic()  # before the look at who lives: who has ended is silent too
            looks = not told or now >= look_at
            if looks:
                self._pass_on(grows=told)
            ended = self.hosts.ends(self.assignment)
            if ended is not None:
                return Failure(None, ended)
            codes = [self._ended(member) for member in self.members]
            lost = first_lost(codes)
            if lost is not None:
                return self._lost(lost, codes[lost])
            if all(code == 0 for code in codes) and (codes or self._passed):
                return None
            if 0 in codes or self._passed:
                over = over or time.monotonic() + END_SECONDS
            if over is not None and time.monotonic() > over:
                late = next(at for at, code in enumerate(codes) if code is None)
                return Failure(late, f"did not end within {END_SECONDS:g} s of the others")
            if not looks:
                continue
            look_at = now + LOOK_SECONDS
            statuses = self._statuses(codes)
            marks.look(statuses, len(codes), first)
            if marks.stepped is not None and not told:
                told = True
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
        return Failure(at, f"ended ({how_ended(code)})", self.members[at].last_words(), code)

    def _ended(self, member: Member) -> int | None:
        """Its exit code; one that was told to stop, and has saved, has ended well."""
        code = member.poll()
        self.stopped = self.stopped or code == STOPPED
        return 0 if code == STOPPED else code

    def _pass_on(self, *, grows: bool) -> None:
        """What has told this machine, or all, to stop: once.

        Args:
          grows: whether to stop so that others can come; not before there are new steps to save.
        """
        self._leave()
        pauses = grows and bool(self.members) and self.hosts.pauses(self.assignment)
        if not self._passed and (self._left or pauses):
            self._passed = True
            for member in self.members:
                member.signal(signal.SIGTERM)

    def _leave(self) -> None:
        """Tell the other hosts, once this machine was told to stop."""
        if not self._left and self.told() is not None:
            self._left = True
            self.hosts.leave()

    def _note_copies(self) -> None:
        """Write down once that no copies are made, and that they are again."""
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
        self.newest = max([self.newest, *(one.step for one in statuses)])
        return statuses

    def _stuck(self, stuck: Stuck, statuses: Sequence[Status]) -> Failure:
        """Ask all for their stacks, and write down what each was at."""
        for member in self.members:
            member.signal(signal.SIGUSR2)
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
        told = {"process": stuck.process, **self.hosts.named(), "processes": at, "stacks": stacks}
        self.journal.add(self.run_folder, "stuck", **told)
        return Failure(stuck.process - self.assignment.first, stuck.why)
