"""A replica of another host's snapshots, from which a run resumes if that host is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxdist.checkpoint.layout import snapshot_of
from jaxdist.elastic.hosts.copies import CopyError, fetch, list_parts, parts_in

LOOK_SECONDS = 0.5
FAILURES = 6
"""The number of consecutive failures after which a replica reports that it makes no copies."""
KEEP = 2
"""The number of snapshots that are kept; there are two, because the newest may be incomplete."""


class SnapshotReplica:
    """A thread that copies the snapshots of a source host during a generation.

    Args:
      address: the address at which the source host sends the parts of its snapshots.
      folder: the folder with the parts that this host has written, which also receives the copies.
      processes: the numbers of the source host's processes.
      total: the number of processes on all hosts.

    Attributes:
      failure: the reason why the copies fail, or None while copies succeed.
    """

    def __init__(
        self,
        address: str,
        folder: Path,
        token: bytes,
        processes: frozenset[int],
        total: int,
        say: Callable[[str], None] = print,
    ) -> None:
        self.address, self.folder, self.token = address, folder, token
        self.processes, self.total, self._say = processes, total, say
        self.failure: str | None = None
        self._closed, self._keeping = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._live, name="snapshot_replica", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the copies at once, even during a transfer, since the source host may be stuck."""
        with self._keeping:
            self._closed.set()

    def look(self) -> None:
        """Copy new parts from the source host, and delete copies of old parts.

        Raises:
          CopyError: the source host cannot be reached.
        """
        theirs = self._newest(list_parts(self.address, self.token))
        here = set(parts_in(self.folder))
        for name in theirs:
            if name not in here and not self._closed.is_set():
                fetch(self.address, name, self.folder, self.token, self._wanted())
        with self._wanted() as wanted:
            for name in self._of(parts_in(self.folder)) if theirs and wanted else []:
                if name not in theirs:
                    (self.folder / name).unlink(missing_ok=True)

    @contextmanager
    def _wanted(self) -> Iterator[bool]:
        """Yield whether copies are still wanted; the answer is valid inside the `with` block."""
        with self._keeping:
            yield not self._closed.is_set()

    def _of(self, names: list[str]) -> list[str]:
        parts = ((name, snapshot_of(name)) for name in names)
        return [n for n, p in parts if p and p[1] in self.processes and p[2] == self.total]

    def _newest(self, names: list[str]) -> list[str]:
        """Return the names of the newest parts of each process of the source host."""
        found: dict[int, list[str]] = {}
        for name in sorted(self._of(names)):
            part = snapshot_of(name)
            assert part is not None
            found.setdefault(part[1], []).append(name)
        return [name for files in found.values() for name in files[-KEEP:]]

    def _live(self) -> None:
        failed = 0
        while not self._closed.wait(LOOK_SECONDS):
            try:
                self.look()
            except CopyError as error:
                # A first failure is not reported. The source host may be lost, which the registry
                # will detect, or may just have deleted an old file.
                failed += 1
                if failed == FAILURES:
                    self.failure = (
                        f"the snapshots of {self.address} cannot be copied at present: {error}; if "
                        "that host is lost, the run continues from the newest checkpoint"
                    )
                    self._say(self.failure)
                continue
            if self.failure is not None:
                self.failure = None
                self._say(f"the snapshots of {self.address} are being copied again")
            failed = 0
