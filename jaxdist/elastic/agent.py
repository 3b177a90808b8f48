"""The agent, which starts the processes of a run, watches them, and restarts them after a failure.

JAX cannot replace a single process of a running group, so after a failure the agent restarts all
processes. The new processes form a *generation*, which has a new port, and resume from the newest
snapshot in memory or the newest checkpoint on disk.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from jaxdist.elastic.assignment import Assignment, Hosts, SingleHost
from jaxdist.elastic.members import Member
from jaxdist.elastic.team import Failure, Team
from jaxdist.elastic.watch import StuckTimeouts
from jaxdist.errors import STOPPED, ConfigError, JaxdistError, RunError
from jaxdist.heartbeat.flight.recorder import Recorder
from jaxdist.heartbeat.journal import Journal
from jaxdist.heartbeat.run_folder import RunFolder, new_folder
from jaxdist.runtime.forks import ForkServer
from jaxdist.runtime.notices import Notice, heard
from jaxdist.types import Json

CONFIG_ERROR = 2
"""The exit code of a process whose configuration is wrong; a restart cannot help."""


@dataclass(frozen=True)
class AgentSettings:
    """The settings of an agent.

    Attributes:
      args: the arguments of `jaxdist.cli.runs.train_process`, which each process runs.
      processes: the number of processes in each generation.
      restarts: the number of consecutive generations that may fail without a new step before the
        run fails.
      stuck_timeouts: the times for which a process may make no progress.
      notices: the sources of preemption notices besides signals. The training processes also poll
        these sources; the agent polls them while no process runs.
    """

    args: Mapping[str, Json]
    processes: int
    restarts: int = 3
    stuck_timeouts: StuckTimeouts = field(default_factory=StuckTimeouts)
    notices: Sequence[Notice] = ()


class Agent:
    """The agent of a run on one machine; the method `run` is called once.

    Args:
      say: the function that prints a line for the user.
      fork_module: the module of the fork server (`jaxdist.runtime.forks`). This package may not
        import the module, which is in a higher layer, so the command passes its name.
      hosts: the hosts of the run; None means this machine alone.
      record: the function that builds the recorder of all generations from the journal and `say`.
    """

    def __init__(
        self,
        plan: AgentSettings,
        say: Callable[[str], None],
        *,
        fork_module: str,
        hosts: Hosts | None = None,
        record: Callable[[Journal, Callable[[str], None]], Recorder] = Recorder,
    ) -> None:
        self.plan, self.say = plan, say
        self.hosts = hosts or SingleHost(plan.processes, resume=bool(plan.args.get("resume")))
        self.newest, self.fork_module = -1, fork_module
        self._stop_reason: str | None = None
        self._started = 0
        self._journal = Journal()
        self._recorder = record(self._journal, say)

    def run(self) -> int:
        """Run one generation after another, and return the exit code of the run.

        Raises:
          ConfigError: a process reported an error that only the user can fix.
          RunError: too many generations failed in a row without a new step, too few hosts joined,
            or a process failed after this machine was asked to stop.
        """
        with new_folder() as folder, self._signals(), heard(self.plan.notices, self._ask_to_stop):
            server = ForkServer(self.fork_module, RunFolder(folder, 0).log(0))
            server.start()  # The fork server's imports take seconds; meanwhile the hosts meet.
            try:
                return self._generations(folder, server)
            finally:
                server.close()
                self._recorder.close()
                self.hosts.close()

    def _generations(self, folder: Path, server: ForkServer) -> int:
        restarts_without_progress, lost_at = 0, None
        while True:
            assignment = self.hosts.begin(folder, lambda: self._stop_reason is not None)
            if assignment is None:
                return 0 if self._stop_reason is None else STOPPED
            run_folder = RunFolder(folder, assignment.generation, assignment.fence)
            before = self.newest
            team = self._team(run_folder, assignment, server)
            try:
                failure = team.watch(lost_at)
                lost_at, self.newest = time.monotonic(), team.newest
                if failure is not None and failure.process is not None:
                    given = (failure.process, failure.how, assignment.processes)
                    self._recorder.lost(run_folder, *given)
            finally:
                # The processes are ended before `release`, because `release` reports that they are
                # gone.
                team.kill()
            if failure is None:
                asked = self._stop_reason is not None or run_folder.noticed() is not None
                code = exit_of(asked=asked, team=team, over=self.hosts.over(assignment))
                if code is not None:
                    return code
                failure = Failure(None, self.hosts.why(assignment))
            self._report(run_folder, assignment, failure)
            if failure.process is not None:
                stalled = self.newest <= before
                restarts_without_progress = restarts_without_progress + 1 if stalled else 0
                self._check(failure, restarts_without_progress)
            stuck = failure.process is not None and failure.code is None
            self.hosts.release(assignment, failure.named, stuck=stuck)

    def _report(self, run_folder: RunFolder, assignment: Assignment, failure: Failure) -> None:
        at = f"at step {max(self.newest, 0)}"
        if failure.process is None:
            self._journal.add(run_folder, "ended", how=failure.how, step=self.newest)
            self.say(f"generation {assignment.generation} ended, {at}: {failure.how}")
            return
        if self._stop_reason is not None:
            # This machine was asked to stop, so no generation follows that could repeat the work.
            raise RunError(f"{failure.named}: {failure.words}")
        event = {"process": failure.process, "how": failure.how, "step": self.newest}
        named = self.hosts.named()
        self._journal.add(run_folder, "lost", **event, words=failure.words, **named)
        if failure.code == CONFIG_ERROR:
            return  # The caller raises the error; no generation follows.
        on = f" on {named['host']}" if named else ""
        words = f"process {failure.process} of {assignment.total}{on} {failure.how}"
        self.say(f"{words}, {at}: generation {assignment.generation + 1} begins")

    def _check(self, failure: Failure, restarts_without_progress: int) -> None:
        error: JaxdistError | None = None
        if failure.code == CONFIG_ERROR:
            error = ConfigError(failure.words.removeprefix("error: "))
        elif restarts_without_progress >= self.plan.restarts:
            error = RunError(
                f"{restarts_without_progress} consecutive generations made no progress; in the "
                f"last generation: {failure.named}. {failure.words}"
            )
        if error is not None:
            self.hosts.fail(error.exit_code, str(error))
            raise error

    def _team(self, run_folder: RunFolder, assignment: Assignment, server: ForkServer) -> Team:
        """Start this machine's processes of a generation, and return the team that watches them."""
        args = {**self.plan.args, "resume": assignment.resume}
        args["run"] = None if assignment.run is None else assignment.run.plain
        if assignment.extra:
            args["extra"] = [*args.get("extra", []), *assignment.extra]
        members = []
        for index in range(assignment.count):
            self._started += 1
            log = run_folder.log(self._started)
            environ = {**run_folder.environ(), **assignment.environ(index)}
            members.append(Member(server, log, assignment.first + index, args, environ))
        return Team(
            run_folder,
            assignment,
            members,
            self.plan.stuck_timeouts,
            self.hosts,
            self._journal,
            self._recorder,
            self.newest,
            lambda: self._stop_reason or run_folder.noticed(),
        )

    def _ask_to_stop(self, by: str) -> None:
        self._stop_reason = self._stop_reason or by

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Catch the signals that end a run, so that all processes stop after the same step."""

        def note(number: int, frame: FrameType | None) -> None:
            self._ask_to_stop(signal.Signals(number).name)

        before = {
            number: signal.signal(number, note)
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def exit_of(*, asked: bool, team: Team, over: bool) -> int | None:
    """Return the exit code of an agent whose processes ended well, or None if it must join again.

    If a host is asked to stop, all hosts save and stop after the same step. The host that was asked
    then leaves the run, and the other hosts continue without it.

    Args:
      asked: whether this machine was asked to stop, by a signal to its agent or by a preemption
        notice to one of its processes.
      over: whether the run has reached its last step.
    """
    if not (asked or over):
        return None
    return STOPPED if team.stopped or (asked and not team.members) else 0
