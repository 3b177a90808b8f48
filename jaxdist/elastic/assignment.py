"""The interface between an agent and the hosts of a run, and its version for a single machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jaxdist.checkpoint.identity import Identity, new_id
from jaxdist.heartbeat.run_folder import RunFolder
from jaxdist.heartbeat.status import Status
from jaxdist.runtime.rendezvous import free_port


@dataclass(frozen=True)
class Assignment:
    """The task of a machine in a generation.

    Attributes:
      generation: the generation's number, which starts at 1 and only grows.
      first: the global number of this machine's first process.
      count: the number of processes on this machine, or 0 if the machine only waits.
      total: the number of processes on all machines.
      coordinator: HOST:PORT at which the processes connect, or None if there is only one process.
      resume: whether to continue from the saved state of a run.
      run: the run to train, or None if the processes find the run by the user's command.
      extra: settings that override the config.
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
        """Return the variables that tell a process its place among all processes."""
        if self.coordinator is None:
            return {}
        return {
            "JAX_COORDINATOR_ADDRESS": self.coordinator,
            "JAX_NUM_PROCESSES": str(self.total),
            "JAX_PROCESS_ID": str(self.first + index),
        }


class Hosts(Protocol):
    """The hosts of a run, as seen by an agent, which calls the methods from one thread only."""

    def begin(self, folder: Path, stopped: Callable[[], bool]) -> Assignment | None:
        """Wait for the next generation that includes this machine.

        Args:
          folder: this machine's folder in memory (`jaxdist.heartbeat.run_folder`).
          stopped: returns True when the wait has to end.

        Returns:
          None if the run is over, or if `stopped` returned True.

        Raises:
          RunError: no generation started in time, or another host reported that the run failed.
        """
        ...

    def ends(self, assignment: Assignment) -> str | None:
        """Return why this machine must end its healthy processes, or None if they may continue."""
        ...

    def pauses(self, assignment: Assignment) -> bool:
        """Return whether all processes have to save and stop, to restart on more machines."""
        ...

    def release(self, assignment: Assignment, why: str = "", *, stuck: bool = False) -> None:
        """Report that all processes of this machine have ended.

        Args:
          why: the failure on this machine, or an empty string if its processes ended well, or
            because the registry ended the generation.
          stuck: whether the process that failed was still alive, but made no progress.
        """
        ...

    def over(self, assignment: Assignment) -> bool:
        """Return whether the run is over, once all processes of this machine have ended well."""
        ...

    def tell(self, assignment: Assignment, statuses: Sequence[Status], now: float) -> None:
        """Publish the progress of this machine's processes to the hosts that wait for them."""
        ...

    def remote_progress(self, assignment: Assignment) -> Sequence[Status] | None:
        """Return the progress of the other machines' processes, or None while some is unknown.

        The times in the result are by this machine's clock.
        """
        ...

    def uncopied(self) -> str | None:
        """Return why this machine fails to copy another's snapshots, or None if it does not."""
        ...

    def why(self, assignment: Assignment) -> str:
        """Return why a generation saved and stopped early without a request to this machine."""
        ...

    def named(self) -> dict[str, str]:
        """Return the fields that identify this machine in the journal, besides process numbers."""
        ...

    def leave(self) -> None:
        """Announce that this machine was asked to stop; its processes will stop shortly."""
        ...

    def fail(self, code: int, words: str) -> None:
        """Report that the run cannot continue on any machine."""
        ...

    def close(self) -> None:
        """Release all resources; no method is called afterwards."""
        ...


class SingleHost:
    """A single machine that runs all processes by itself.

    Args:
      processes: the number of processes in each generation.
      resume: whether the first generation continues a saved run.
    """

    def __init__(self, processes: int, *, resume: bool = False) -> None:
        self.processes, self.resume = processes, resume
        self._number, self._id = 0, new_id()

    def begin(self, folder: Path, stopped: Callable[[], bool]) -> Assignment | None:
        """Return the next generation at once."""
        self._number += 1
        count = self.processes
        coordinator = f"127.0.0.1:{free_port()}" if count > 1 else None
        known = RunFolder(folder, self._number).known_run()
        # If no process got far enough to publish the path, the next generation finds the run by its
        # id.
        run, resume = known or Identity(self._id), self.resume or known is not None
        return Assignment(self._number, 0, count, count, coordinator, resume, run)

    def ends(self, assignment: Assignment) -> str | None:
        """Return None: on a single machine, only the processes end a generation."""
        return None

    def pauses(self, assignment: Assignment) -> bool:
        """Return False: no machine can join."""
        return False

    def release(self, assignment: Assignment, why: str = "", *, stuck: bool = False) -> None:
        """Do nothing: no other machine waits."""

    def over(self, assignment: Assignment) -> bool:
        """Return True: processes that ended well have finished the run."""
        return True

    def tell(self, assignment: Assignment, statuses: Sequence[Status], now: float) -> None:
        """Do nothing: no other machine waits."""

    def remote_progress(self, assignment: Assignment) -> Sequence[Status]:
        """Return an empty sequence: there are no other machines."""
        return ()

    def uncopied(self) -> str | None:
        """Return None: there is no other machine whose snapshots could be replicated."""
        return None

    def why(self, assignment: Assignment) -> str:
        """Return an empty reason; the agent never calls this, because `over` returns True."""
        return ""

    def named(self) -> dict[str, str]:
        """Return an empty mapping: there is only one machine."""
        return {}

    def leave(self) -> None:
        """Do nothing: no other machine waits."""

    def fail(self, code: int, words: str) -> None:
        """Do nothing: there is no other machine to inform."""

    def close(self) -> None:
        """Do nothing: a single machine holds no resources."""
