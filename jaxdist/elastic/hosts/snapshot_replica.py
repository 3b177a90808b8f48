"""A copy of what another host has of the snapshots: the loss of one host leaves them whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxdist.checkpoint.layout import snapshot_of
from jaxdist.elastic.hosts.copies import CopyError, fetch, list_parts, parts_in

LOOK_SECONDS = 0.5
FAILURES = 6
"""In a row, after which a buddy says that it makes no copies."""
KEEP = 2
"""The newest may not be whole yet."""


class SnapshotReplica:
    """Follows one host in a generation; `close` it.

    Args:
      address: at which that host hands out its parts.
      folder: of this host's own parts, where the copies come to lie too.
      processes: numbers of that host's processes, among `total`.

    Attributes:
      failure: why no copies are made; None while they are.
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
        """Copy nothing any more; what is under way, from a host that may be stuck, is dropped."""
        with self._keeping:
            self._closed.set()

    def look(self) -> None:
        """Copy what is new, and take away what is old.

        Raises:
          CopyError: the host cannot be reached.
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
        """Whether it still copies, which does not change inside."""
        with self._keeping:
            yield not self._closed.is_set()

    def _of(self, names: list[str]) -> list[str]:
        parts = ((name, snapshot_of(name)) for name in names)
        return [n for n, p in parts if p and p[1] in self.processes and p[2] == self.total]

    def _newest(self, names: list[str]) -> list[str]:
        """Of that host's own processes, each one's newest."""
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
                # A first failure says little: the host may be lost, which the registry will say,
                # or has just taken away an old file.
                failed += 1
                if failed == FAILURES:
                    self.failure = (
                        f"no copy is made of the snapshots of {self.address}: {error}; if that "
                        "host is lost, the run goes on from the newest checkpoint"
                    )
                    self._say(self.failure)
                continue
            if self.failure is not None:
                self.failure = None
                self._say(f"copies are made of the snapshots of {self.address} again")
            failed = 0
