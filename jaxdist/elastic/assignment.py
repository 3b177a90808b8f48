"""Who takes part in a run: what an agent asks, and the answer of one machine alone."""

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
    """What a machine does in a generation.

    Attributes:
      generation: from 1; the numbers grow.
      first: number of the first of its processes, among all.
      count: how many processes it has; 0 in a generation that has no use for it.
      total: how many all machines have.
      coordinator: HOST:PORT where processes meet; None for one that is alone.
      resume: whether it goes on with what a run has saved.
      run: which run; None: the processes find out, as the user's command says.
      extra: settings that replace those of the config.
      fence: name under which what is written is fenced, see `jaxdist.heartbeat.fence`; None: no
        other generation can be at work.
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
        """The numbers of its processes."""
        return range(self.first, self.first + self.count)

    def environ(self, index: int) -> dict[str, str]:
        """What tells a process of this machine who it is among all."""
        if self.coordinator is None:
            return {}
        return {
            "JAX_COORDINATOR_ADDRESS": self.coordinator,
            "JAX_NUM_PROCESSES": str(self.total),
            "JAX_PROCESS_ID": str(self.first + index),
        }


class Hosts(Protocol):
    """Who takes part; an agent asks from one thread."""

    def begin(self, folder: Path, stopped: Callable[[], bool]) -> Assignment | None:
        """Wait for the next generation that this machine is in.

        Args:
          folder: of this machine, in memory: see `jaxdist.heartbeat.run_folder`.
          stopped: whether the wait shall end.

        Returns:
          None: the run is over, or `stopped`.

        Raises:
          RunError: nothing began for too long, or other hosts gave up.
        """
        ...

    def ends(self, assignment: Assignment) -> str | None:
        """Why the processes of this machine must be ended though none was lost; None: go on."""
        ...

    def pauses(self, assignment: Assignment) -> bool:
        """Whether the processes of this machine, with all others, are to save and stop, and to
        begin again with more machines."""
        ...

    def release(self, assignment: Assignment, why: str = "", *, stuck: bool = False) -> None:
        """All processes of this machine are gone.

        Args:
          why: what was lost here; empty where they ended well, or were told to.
          stuck: whether what was lost lived, and stood still.
        """
        ...

    def over(self, assignment: Assignment) -> bool:
        """Whether the run is over, where all processes of this machine have ended well."""
        ...

    def tell(self, assignment: Assignment, statuses: Sequence[Status], now: float) -> None:
        """What the processes of this machine are at, for who waits for them."""
        ...

    def remote_progress(self, assignment: Assignment) -> Sequence[Status] | None:
        """What those of all others are at, by this machine's clock; None: not all have told."""
        ...

    def uncopied(self) -> str | None:
        """Why this machine makes no copies of another's snapshots; None: it does, or need not."""
        ...

    def why(self, assignment: Assignment) -> str:
        """Why a generation ended whose processes have all saved and stopped before the run's end,
        and this machine was not told to."""
        ...

    def named(self) -> dict[str, str]:
        """What to write down of this machine, beside the number of a process."""
        ...

    def leave(self) -> None:
        """This machine was told to stop; its processes will be in a moment."""
        ...

    def fail(self, code: int, words: str) -> None:
        """The run cannot go on, on any machine."""
        ...

    def close(self) -> None:
        """Nothing is asked any more."""
        ...


class SingleHost:
    """One machine, of which nobody else knows.

    Args:
      processes: of each generation.
      resume: whether the first generation goes on with a run.
    """

    def __init__(self, processes: int, *, resume: bool = False) -> None:
        self.processes, self.resume = processes, resume
        self._number, self._id = 0, new_id()

    def begin(self, folder: Path, stopped: Callable[[], bool]) -> Assignment | None:
        """The next generation, at once."""
        self._number += 1
        count = self.processes
        coordinator = f"127.0.0.1:{free_port()}" if count > 1 else None
        known = RunFolder(folder, self._number).known_run()
        # Where no process came so far as to tell the path, the next finds it by the id.
        run, resume = known or Identity(self._id), self.resume or known is not None
        return Assignment(self._number, 0, count, count, coordinator, resume, run)

    def ends(self, assignment: Assignment) -> str | None:
        """Never."""
        return None

    def pauses(self, assignment: Assignment) -> bool:
        """Never."""
        return False

    def release(self, assignment: Assignment, why: str = "", *, stuck: bool = False) -> None:
        """Nobody waits for it."""

    def over(self, assignment: Assignment) -> bool:
        """It is."""
        return True

    def tell(self, assignment: Assignment, statuses: Sequence[Status], now: float) -> None:
        """Nobody waits for it."""

    def remote_progress(self, assignment: Assignment) -> Sequence[Status]:
        """There are no others."""
        return ()

    def uncopied(self) -> str | None:
        """There is no other to copy from."""
        return None

    def why(self, assignment: Assignment) -> str:
        """It is not asked: `over` is true."""
        return ""

    def named(self) -> dict[str, str]:
        """There is no other."""
        return {}

    def leave(self) -> None:
        """Nobody waits for it."""

    def fail(self, code: int, words: str) -> None:
        """Nobody else is to be told."""

    def close(self) -> None:
        """There is nothing to close."""
