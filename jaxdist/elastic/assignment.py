"""The interface between an agent and the hosts of a run, and its version for a single machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxdist.checkpoint.identity import Identity, new_id
from jaxdist.heartbeat.run_folder import RunFolder
from jaxdist.heartbeat.status import Status
from jaxdist.runtime.rendezvous import free_port


@dataclass(frozen=True)
class Assignment:
    """The work of a machine in a generation: which processes it starts, and for which run.

    Attributes:
      generation: the generation's number, which starts at 1 and only grows.
      first: the global number of this machine's first process.
      count: the number of processes on this machine, or 0 if the machine waits in reserve.
      total: the number of processes on all machines.
      coordinator: the HOST:PORT to which the processes connect, or None if there is only one
        process.
      resume: whether to continue from the saved state of a run.
      run: the identity of the run to train, or None if the processes find the run by the user's
        command.
      extra: the settings that override the config.
      fence: the name that all generations of the run share (`RunFolder.fence`), or None if no other
        generation can be running.
    """

    generation: int
    first: int
    count: int
    total: int
    coordinator: str | None
    resume: bool
    run: Identity | None = None
    extra: tuple[str, ...] = ()
    fence: str | None = None

    @property
    def processes(self) -> range:
        """The global numbers of this machine's processes."""
        return range(self.first, self.first + self.count)

    def environ(self, index: int) -> dict[str, str]:
        """Return the environment variables with which a process finds the other processes.

        Args:
          index: the number of the process on this machine.
        """
        if self.coordinator is None:
            return {}
        return {
            "JAX_COORDINATOR_ADDRESS": self.coordinator,
            "JAX_NUM_PROCESSES": str(self.total),
            "JAX_PROCESS_ID": str(self.first + index),
        }


class Hosts:
    """The hosts of a run, as an agent sees them; all methods are called from a single thread.

    The methods of this class except `begin` suit a machine that is alone.
    """

    def begin(self, folder: Path, stopped: Callable[[], bool]) -> Assignment | None:
        """Wait for the next generation that includes this machine.

        Args:
          folder: this machine's folder in memory (`jaxdist.heartbeat.run_folder`).
          stopped: the function that returns True when the wait has to end.

        Returns:
          The assignment of this machine, or None if the run is over or `stopped` returned True.

        Raises:
          RunError: no generation started in time, or another host reported that the run failed.
        """
        raise NotImplementedError

    def ends(self, assignment: Assignment) -> str | None:
        """Return the reason why this machine must end its processes, or None to continue."""
        return None

    def pauses(self, assignment: Assignment) -> bool:
        """Return whether all processes must save and stop, so that more hosts can join."""
        return False

    def release(self, assignment: Assignment, why: str = "", *, stuck: bool = False) -> None:
        """Report that all processes of this machine have ended.

        Args:
          why: the description of the failure on this machine, which is empty if the processes ended
            well or the registry ended the generation.
          stuck: whether the failed process was alive and made no progress.
        """

    def over(self, assignment: Assignment) -> bool:
        """Return whether the run is complete; called after all processes here have ended well."""
        return True

    def tell(self, assignment: Assignment, statuses: Sequence[Status], now: float) -> None:
        """Publish the progress of this machine's processes to the other hosts."""

    def remote_progress(self, assignment: Assignment) -> Sequence[Status] | None:
        """Return the progress of other machines' processes, or None if any status is unknown.

        The times in the statuses are by this machine's clock.
        """
        return ()

    def uncopied(self) -> str | None:
        """Return why this machine does not copy another host's snapshots, or None if it does."""
        return None

    def why(self, assignment: Assignment) -> str:
        """Return the reason why a generation stopped early without a request to this machine."""
        return ""

    def named(self) -> dict[str, str]:
        """Return the fields of a journal event that identify this machine."""
        return {}

    def leave(self) -> None:
        """Announce that this machine was asked to stop and that its processes will stop soon."""

    def fail(self, code: int, words: str) -> None:
        """Report that the run cannot continue on any machine.

        Args:
          code: the exit code of the run.
          words: the reason, for the user.
        """

    def close(self) -> None:
        """Release all resources; the agent calls no other method after this call."""


class SingleHost(Hosts):
    """A single machine that runs all processes by itself.

    Args:
      processes: the number of processes in each generation.
      resume: whether the first generation continues a saved run.
    """

    def __init__(self, processes: int, *, resume: bool = False) -> None:
        self.processes, self.resume = processes, resume
        self._number, self._id = 0, new_id()

    def begin(self, folder: Path, stopped: Callable[[], bool]) -> Assignment | None:
        """Return the assignment of the next generation, without a wait."""
        self._number += 1
        count = self.processes
        coordinator = f"127.0.0.1:{free_port()}" if count > 1 else None
        known = RunFolder(folder, self._number).known_run()
        # If a generation failed before it published the path of its run, the next generation finds
        # the run by the run's id.
        run, resume = known or Identity(self._id), self.resume or known is not None
        return Assignment(self._number, 0, count, count, coordinator, resume, run)
