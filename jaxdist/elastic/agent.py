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

from jaxdist.elastic.members import Member
from jaxdist.elastic.part import Alone, Hosts, Part
from jaxdist.elastic.team import Lost, Team
from jaxdist.elastic.watch import Patience
from jaxdist.errors import STOPPED, ConfigError, JaxdistError, RunError
from jaxdist.heartbeat.flight.recorder import Recorder
from jaxdist.heartbeat.journal import Journal
from jaxdist.heartbeat.place import Place, new_folder
from jaxdist.runtime.forks import ForkServer
from jaxdist.runtime.notices import Notice, heard
from jaxdist.types import Json

CONFIG_ERROR = 2
"""Exit code of what only a person can mend."""


@dataclass(frozen=True)
class Plan:
    """What an agent does.

    Attributes:
      args: of `jaxdist.cli.runs.train_process`.
      processes: of each generation.
      restarts: generations in a row that may end without a step that none before had come to.
      notices: who tells, besides signals, that this machine will be taken away. Processes hear
        them too; the agent does where it has none of them at work.
    """

    args: Mapping[str, Json]
    processes: int
    restarts: int = 3
    patience: Patience = field(default_factory=Patience)
    notices: Sequence[Notice] = ()


class Agent:
    """The agent of a run on one machine; `run` once.

    Args:
      say: tells the user a line.
      standby: the module whose process forks those of the run, see `jaxdist.runtime.forks`. It
        stands above this room in the layers, so that a command passes its name down.
      hosts: who takes part; None is this machine alone.
      record: makes what hears of all generations, of the journal and `say`.
    """

    def __init__(
        self,
        plan: Plan,
        say: Callable[[str], None],
        *,
        standby: str,
        hosts: Hosts | None = None,
        record: Callable[[Journal, Callable[[str], None]], Recorder] = Recorder,
    ) -> None:
        self.plan, self.say = plan, say
        self.hosts = hosts or Alone(plan.processes, resume=bool(plan.args.get("resume")))
        self.newest, self.standby = -1, standby
        self._told: str | None = None
        self._started = 0
        self._journal = Journal()
        self._recorder = record(self._journal, say)

    def run(self) -> int:
        """All generations; the exit code of the run.

        Raises:
          ConfigError: what only a person can mend, as a process has told it.
          RunError: generation after generation was lost, or there are too few hosts.
        """
        with new_folder() as folder, self._signals(), heard(self.plan.notices, self._tell):
            server = ForkServer(self.standby, Place(folder, 0).log(0))
            server.start()  # it imports while hosts meet
            try:
                return self._generations(folder, server)
            finally:
                server.close()
                self._recorder.close()
                self.hosts.close()

    def _generations(self, folder: Path, server: ForkServer) -> int:
        in_vain, lost_at = 0, None
        while True:
            part = self.hosts.begin(folder, lambda: self._told is not None)
            if part is None:
                return 0 if self._told is None else STOPPED
            place, before = Place(folder, part.generation, part.fence), self.newest
            team = self._team(place, part, server)
            try:
                found = team.watch(lost_at)
                lost_at, self.newest = time.monotonic(), team.newest
                if found is not None and found.process is not None:
                    lost = part.first + found.process
                    self._recorder.lost(place, lost, found.how, part.processes)
            finally:
                team.kill()
            if found is None:
                told = self._told is not None or place.noticed() is not None
                code = exit_of(told=told, team=team, over=self.hosts.over(part))
                if code is not None:
                    return code
                found = Lost(None, self.hosts.why(part))
            self._tell_lost(place, part, found)
            if found.process is not None:
                in_vain = 0 if self.newest > before else in_vain + 1
                self._check(part, found, in_vain)
            if found.process is None:
                self.hosts.release(part)
            else:
                stuck = found.code is None
                self.hosts.release(part, _named(part, found), stuck=stuck)

    def _tell_lost(self, place: Place, part: Part, found: Lost) -> None:
        at = f"at step {max(self.newest, 0)}"
        if found.process is None:
            self._journal.add(place, "ended", how=found.how, step=self.newest)
            self.say(f"generation {part.generation} ended, {at}: {found.how}")
            return
        process = part.first + found.process
        if self._told is not None:
            raise RunError(f"process {process} {found.how}: {found.words}")
        told = {"process": process, "how": found.how, "step": self.newest, "words": found.words}
        named = self.hosts.named()
        self._journal.add(place, "lost", **told, **named)
        if found.code == CONFIG_ERROR:
            return  # the error is told, and nothing begins
        on = f" on {named['host']}" if named else ""
        words = f"process {process} of {part.total}{on} {found.how}"
        self.say(f"{words}, {at}: generation {part.generation + 1} begins")

    def _check(self, part: Part, lost: Lost, in_vain: int) -> None:
        error: JaxdistError | None = None
        if lost.code == CONFIG_ERROR:
            error = ConfigError(lost.words.removeprefix("error: "))
        elif in_vain >= self.plan.restarts:
            error = RunError(
                f"{in_vain} generations in a row came to no new step; the last: "
                f"{_named(part, lost)}. {lost.words}"
            )
        if error is not None:
            self.hosts.fail(error.exit_code, str(error))
            raise error

    def _team(self, place: Place, part: Part, server: ForkServer) -> Team:
        """The processes of a generation."""
        args = {**self.plan.args, "resume": part.resume}
        args["run"] = None if part.run is None else part.run.plain
        if part.extra:
            args["extra"] = [*args.get("extra", []), *part.extra]
        members = []
        for index in range(part.count):
            self._started += 1
            log = place.log(self._started)
            environ = {**place.environ(), **part.environ(index)}
            members.append(Member(server, log, part.first + index, args, environ))
        return Team(
            place,
            part,
            members,
            self.plan.patience,
            self.hosts,
            self._journal,
            self._recorder,
            self.newest,
            lambda: self._told or place.noticed(),
        )

    def _tell(self, by: str) -> None:
        self._told = self._told or by

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass on what ends a run; all its processes save and stop at one step."""

        def note(number: int, frame: FrameType | None) -> None:
            self._tell(signal.Signals(number).name)

        before = {
            number: signal.signal(number, note)
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def exit_of(*, told: bool, team: Team, over: bool) -> int | None:
    """The exit code of an agent whose processes have all ended well; None: it takes part again.

    Of several hosts all save and stop where one is told to; that one takes part no more, whoever
    told it: a signal to the agent, or a notice that only a process of it has heard. The others go
    on without it.

    Args:
      told: whether this machine was told to stop.
      over: whether the run has come to its end.
    """
    if not (told or over):
        return None
    return STOPPED if team.stopped or (told and not team.members) else 0


def _named(part: Part, lost: Lost) -> str:
    assert lost.process is not None
    return f"process {part.first + lost.process} {lost.how}"
