"""The processes that other hosts offer to a run with parameter servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from jaxdist.errors import RunError, StoppedError
from jaxdist.wire.config import ProcessesConfig
from jaxdist.wire.gate import RemoteProcess, open_gate, too_few

POLL_SECONDS = 0.2


class Offers:
    """The offers of other hosts to start servers and workers of a run.

    When all wanted servers have come, further servers are refused. A further worker waits until it
    replaces a worker that dies.

    Args:
      wanted: the number of processes that the run waits for, by role.
    """

    def __init__(self, wanted: Mapping[str, int]) -> None:
        self._wanted = wanted
        self._stack = ExitStack()
        self._changed = threading.Condition()
        self._offers: list[RemoteProcess] = []

    def open(self, run: Path, settings: ProcessesConfig, token: str, devices: int) -> None:
        """Let hosts offer processes until `close`.

        Args:
          devices: the number of devices of a server, which computes on the CPU of its host.
        """
        if any(self._wanted.values()):
            open_gate(run, settings, token, self.offer, self._stack, devices=devices)

    def offer(self, remote: RemoteProcess) -> None:
        """Keep an offered process until the run takes the process, or refuse the offer."""
        with self._changed:
            if remote.role == "server" and len(self._alive("server")) >= self._wanted["server"]:
                remote.refuse(
                    "the run already has all of its servers: raise strategy.servers "
                    "to use this host"
                )
                return
            self._offers.append(remote)
            self._changed.notify_all()

    def gather(
        self, note: Callable[[str], None], seconds: float, stopped: Callable[[], bool]
    ) -> None:
        """Wait until all wanted processes have been offered.

        Args:
          note: a function that prints a line about what the run waits for.
          seconds: the largest time to wait, in seconds.
          stopped: a function that returns whether the run was asked to stop.

        Raises:
          StoppedError: the run was asked to stop.
          RunError: the time is over.
        """
        deadline = time.monotonic() + seconds
        for role, count in self._wanted.items():
            if count:
                note(f"waiting for {count} {role}s of other hosts")
            with self._changed:
                while len(self._alive(role)) < count:
                    if stopped():
                        raise StoppedError(
                            f"the run was asked to stop while it waited for {role}s of other hosts"
                        )
                    if time.monotonic() > deadline:
                        raise RunError(too_few(len(self._alive(role)), count, f"{role}s", seconds))
                    self._changed.wait(POLL_SECONDS)

    def take(self, role: str) -> RemoteProcess | None:
        """Return the next process of a role, or None if there is none."""
        with self._changed:
            found = next(iter(self._alive(role)), None)
            if found is not None:
                self._offers.remove(found)
            return found

    def close(self) -> None:
        """End the processes that were offered but not taken, and take no others."""
        with self._changed:
            for role in self._wanted:
                for remote in self._alive(role):
                    remote.release()
        self._stack.close()

    def _alive(self, role: str) -> list[RemoteProcess]:
        return [one for one in self._offers if one.role == role and not one.gone]
