"""An agent: it starts the processes of a run, watches them, and begins anew when one is lost.

In jax a process that is lost cannot be replaced among the others, so that what is begun anew is a
generation: new processes, a new port, the state from the newest snapshot in memory, or checkpoint.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from jaxdist.elastic.flight.recorder import Recorder
from jaxdist.elastic.journal import Journal
from jaxdist.elastic.members import Member, how_ended
from jaxdist.elastic.part import Alone, Hosts, Part
from jaxdist.elastic.place import Place, new_folder
from jaxdist.elastic.status import Status, read_status
from jaxdist.elastic.watch import Patience, Stuck, find_stuck, first_lost
from jaxdist.errors import STOPPED, ConfigError, JaxdistError, RunError
from jaxdist.metrics.account import Kind
from jaxdist.types import Json

POLL_SECONDS, LOOK_SECONDS = 0.05, 0.1
"""Between two looks at who lives, and once a generation takes steps, at what they say."""
END_SECONDS = 120.0
"""For so long others may go on when one process has ended well, or all were told to stop."""
STACK_SECONDS, STACK_LINES = 0.5, 200
CONFIG_ERROR = 2
"""Exit code of what only a person can mend."""


@dataclass(frozen=True)
class Plan:
    """What an agent does.

    Attributes:
      args: of `jaxdist.cli.runs.train_process`.
      processes: of each generation.
      restarts: generations in a row that may end without a step that none before had come to.
    """

    args: Mapping[str, Json]
    processes: int
    restarts: int = 3
    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True)
class Lost:
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


_BEFORE = frozenset({Kind.START, Kind.RECOVERY})


class Agent:
    """The agent of a run on one machine; `run` once.

    Args:
      say: tells the user a line.
      hosts: who takes part; None is this machine alone.
      record: makes what hears of all generations, of the journal and `say`.
    """

    def __init__(
        self,
        plan: Plan,
        say: Callable[[str], None],
        *,
        hosts: Hosts | None = None,
        record: Callable[[Journal, Callable[[str], None]], Recorder] = Recorder,
    ) -> None:
        self.plan, self.say = plan, say
        self.hosts = hosts or Alone(plan.processes, resume=bool(plan.args.get("resume")))
        self.newest = -1
        self._signal: int | None = None
        self._passed = self._stopped = False
        self._started = 0
        self._waiting: list[Member] = []
        self._journal = Journal()
        self._recorder = record(self._journal, say)

    def run(self) -> int:
        """All generations; the exit code of the run.

        Raises:
          ConfigError: what only a person can mend, as a process has told it.
          RunError: generation after generation was lost, or there are too few hosts.
        """
        with new_folder() as folder, self._signals():
            try:
                return self._generations(folder)
            finally:
                for member in self._waiting:
                    member.kill()
                self._recorder.close()
                self.hosts.close()

    def _generations(self, folder: Path) -> int:
        in_vain, lost_at = 0, None
        while True:
            part = self.hosts.begin(folder, lambda: self._signal is not None)
            if part is None:
                return 0 if self._signal is None else STOPPED
            self._stopped = False
            place, before = Place(folder, part.generation, part.fence), self.newest
            team = self._team(place, part)
            try:
                found = self._watch(place, part, team, lost_at)
                lost_at = time.monotonic()
                if found is not None and found.process is not None:
                    lost = part.first + found.process
                    self._recorder.lost(place, lost, found.how, part.processes)
            finally:
                for member in team:
                    member.kill()
            if found is None and (self._signal is not None or self.hosts.over(part)):
                return STOPPED if self._stopped else 0
            if found is not None:
                self._tell_lost(place, part, found)
            if found is not None and found.process is not None:
                in_vain = 0 if self.newest > before else in_vain + 1
                self._check(part, found, in_vain)
            self.hosts.release(part, "" if found is None or found.process is None else found.how)

    def _tell_lost(self, place: Place, part: Part, found: Lost) -> None:
        at = f"at step {max(self.newest, 0)}"
        if found.process is None:
            self._journal.add(place, "ended", how=found.how, step=self.newest)
            self.say(f"generation {part.generation} ended, {at}: {found.how}")
            return
        process = part.first + found.process
        if self._signal is not None:
            raise RunError(f"process {process} {found.how}: {found.words}")
        told = {"process": process, "how": found.how, "step": self.newest, "words": found.words}
        self._journal.add(place, "lost", **told)
        words = f"process {process} of {part.total} {found.how}"
        self.say(f"{words}, {at}: generation {part.generation + 1} begins")

    def _check(self, part: Part, lost: Lost, in_vain: int) -> None:
        error: JaxdistError | None = None
        if lost.code == CONFIG_ERROR:
            error = ConfigError(lost.words.removeprefix("error: "))
        elif in_vain >= self.plan.restarts:
            error = RunError(
                f"{in_vain} generations in a row came to no new step; the last: process "
                f"{part.first + (lost.process or 0)} {lost.how}. {lost.words}"
            )
        if error is not None:
            self.hosts.fail(error.exit_code, str(error))
            raise error

    def _team(self, place: Place, part: Part) -> list[Member]:
        """The processes of a generation, those first that wait already."""
        alive = [member for member in self._waiting if member.poll() is None]
        team, self._waiting = alive[: part.count], alive[part.count :]
        team += [self._member(place.folder) for _ in range(part.count - len(team))]
        args = dict(self.plan.args)
        if part.extra:
            args["extra"] = [*args.get("extra", []), *part.extra]
        for index, member in enumerate(team):
            environ = {**place.environ(), **part.environ(index)}
            member.begin(part.first + index, {**args, "resume": part.resume}, environ)
        return team

    def _member(self, folder: Path) -> Member:
        self._started += 1
        return Member(Place(folder, 0).log(self._started))

    def _watch(
        self, place: Place, part: Part, team: Sequence[Member], lost_at: float | None
    ) -> Lost | None:
        """Until it has ended well (None), or cannot go on."""
        marks, first, over = Marks(time.monotonic()), max(self.newest + 1, 1), None
        told, look_at = False, 0.0
        while True:
            time.sleep(POLL_SECONDS)
            self._pass_on(team)
            ended = self.hosts.ends(part)
            if ended is not None:
                return Lost(None, ended)
            now = time.monotonic()  # before the look at who lives: who has ended is silent too
            codes = [self._ended(member) for member in team]
            lost = first_lost(codes)
            if lost is not None:
                code = codes[lost]
                assert code is not None
                self._statuses(place, part, [None] * len(team))  # of the dead too: their last words
                return Lost(lost, f"ended ({how_ended(code)})", team[lost].last_words(), code)
            if all(code == 0 for code in codes) and (team or self._signal is not None):
                return None
            if 0 in codes or self._signal is not None:
                over = over or time.monotonic() + END_SECONDS
            if over is not None and time.monotonic() > over:
                late = next(at for at, code in enumerate(codes) if code is None)
                return Lost(late, f"did not end within {END_SECONDS:g} s of the others")
            if told and now < look_at:
                continue
            look_at = now + LOOK_SECONDS
            statuses = self._statuses(place, part, codes)
            marks.look(statuses, len(team), first)
            if marks.stepped is not None and not told:
                told = True
                self._tell_begun(place, marks, lost_at, [one.pid for one in statuses])
                self._recorder.begun()
                # Not earlier: what they import would keep the cores from the first step.
                lacking = part.count - len(self._waiting)
                self._waiting += [self._member(place.folder) for _ in range(lacking)]
            self._recorder.look(place, statuses)
            stuck = find_stuck(statuses, now, self.plan.patience)
            if stuck is not None:
                return self._stuck(place, part, team, stuck, statuses)

    def _ended(self, member: Member) -> int | None:
        """Its exit code; one that was told to stop, and has saved, has ended well."""
        code = member.poll()
        self._stopped = self._stopped or code == STOPPED
        return 0 if code == STOPPED else code

    def _pass_on(self, team: Sequence[Member]) -> None:
        """A signal that has come, once."""
        if self._signal is not None and not self._passed:
            self._passed = True
            self.hosts.leave()
            for member in team:
                member.signal(signal.SIGTERM)

    def _statuses(self, place: Place, part: Part, codes: Sequence[int | None]) -> list[Status]:
        found = (
            read_status(place.status(part.first + index))
            for index, code in enumerate(codes)
            if code is None
        )
        statuses = [one for one in found if one is not None]
        self.newest = max([self.newest, *(one.step for one in statuses)])
        return statuses

    def _stuck(
        self,
        place: Place,
        part: Part,
        team: Sequence[Member],
        stuck: Stuck,
        statuses: Sequence[Status],
    ) -> Lost:
        """Ask all for their stacks, and write down what each was at."""
        for member in team:
            member.signal(signal.SIGUSR2)
        time.sleep(STACK_SECONDS)
        stacks = {str(member.index): member.last_words(STACK_LINES) for member in team}
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
        self._journal.add(place, "stuck", process=stuck.process, processes=at, stacks=stacks)
        return Lost(stuck.process - part.first, stuck.why)

    def _tell_begun(
        self, place: Place, marks: Marks, lost_at: float | None, pids: Sequence[int]
    ) -> None:
        assert marks.up is not None
        assert marks.restored is not None
        assert marks.stepped is not None
        times = {
            "stop_seconds": 0.0 if lost_at is None else marks.begun - lost_at,
            "restart_seconds": marks.up - marks.begun,
            "restore_seconds": marks.restored - marks.up,
            "first_step_seconds": marks.stepped - marks.restored,
        }
        self._journal.add(place, "begun", pids=[*pids], **times)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass on what ends a run; all its processes save and stop at one step."""

        def note(number: int, frame: FrameType | None) -> None:
            self._signal = number

        before = {
            number: signal.signal(number, note)
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
