"""A worker's client of all table servers: pulls of unique rows, and pushes of their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxdist.param_server.consistency.contract import Consistency
from jaxdist.param_server.live.exchange import ServerLink
from jaxdist.param_server.live.linked import LinkedClient, Timeouts
from jaxdist.param_server.protocol import client as protocol
from jaxdist.param_server.protocol.messages import Answer, Reply
from jaxdist.tables.keys import servers_of
from jaxdist.tables.messages import pack
from jaxdist.wire.contract import Wire


class TableClient(LinkedClient):
    """A worker's sessions with all table servers; only one thread may use the client.

    Args:
      number: the number of the client.
      model: the consistency model of the servers.
      wires: the connections to the leaders of the ranges, in the order of the ranges' numbers.
      width: the number of values in a row.
      most: the number of rows that servers keep, or 0 if they keep all rows.
    """

    def __init__(
        self,
        number: int,
        model: Consistency,
        wires: Sequence[Wire],
        width: int,
        *,
        most: int = 0,
        patience: Timeouts | None = None,
    ) -> None:
        self.width, self._most = width, most
        self._rows: np.ndarray | None = None
        self._found: tuple[np.ndarray, list[int | None]] | None = None
        names = [(server, f"table server {server}") for server in range(len(wires))]
        super().__init__(number, model, names, wires, patience=patience)

    def pull(self, rows: np.ndarray) -> np.ndarray:
        """Return the values, float32 `[N, D]`, of unique rows (uint32 or keys, `[N]`).

        The consistency model determines which pushes the values include.

        Raises:
          RunError: the deadline passed, or a server refused a message or has died.
        """
        if self._rows is None:
            self.begin(rows)
            return self.take()
        # The rows of the next step may have been requested already. They are received and kept
        # before `rows` are requested, since a server answers one pull after another.
        kept = self._found or self._finish(self._rows)
        found, _ = self._finish(rows, begins=True)
        self._found = kept
        return found

    def begin(self, rows: np.ndarray) -> None:
        """Ask for the values of unique rows without waiting; `take` returns the values."""
        assert self._rows is None, "an earlier pull is not taken"
        self._rows = rows
        self._ask(rows)

    def take(self) -> np.ndarray:
        """Wait for the values of the rows that `begin` asked for, and return these values.

        The client assumes that the gradients of the next push are computed from these values.

        Raises:
          RunError: the deadline passed, or a server refused a message or has died.
        """
        assert self._rows is not None, "no pull has begun"
        found, self._read = self._found or self._finish(self._rows)
        self._rows = self._found = None
        return found

    def _ask(self, rows: np.ndarray) -> None:
        owner = servers_of(rows, len(self._links), self._most)
        with self._changed:
            for link in self._links:
                mine = pack(rows[owner == link.server])
                link.copy = None
                self._send(link, protocol.pull(link.state), mine)

    def _finish(
        self, rows: np.ndarray, *, begins: bool = False
    ) -> tuple[np.ndarray, list[int | None]]:
        """Wait for rows; return their values, and the version of each server's rows.

        The version of a server's rows is None before the first reply of this server.

        Args:
          rows: the rows, uint32 or keys.
          begins: whether to request the rows first.
        """
        if begins:
            self._ask(rows)
        owner = servers_of(rows, len(self._links), self._most)
        with self._changed:
            self._wait(lambda: all(one.copy is not None for one in self._links), "rows")
            found = np.empty((len(rows), self.width), np.float32)
            for link in self._links:
                assert link.copy is not None
                found[owner == link.server] = link.copy.view(np.float32).reshape(-1, self.width)
            return found, [link.state.version for link in self._links]

    def push(self, rows: np.ndarray, grads: np.ndarray, rate: float) -> None:
        """Send the gradients `[N, D]` of the unique rows that were pulled.

        The call waits only if too many earlier pushes are not acknowledged.

        Args:
          rate: the learning rate of the step.

        Raises:
          RunError: the deadline passed while too many pushes were not acknowledged.
        """
        owner = servers_of(rows, len(self._links), self._most)
        usable = bool(np.isfinite(grads).all())
        with self._changed:
            self._wait_for_room()
            for link, version in zip(self._links, self._read, strict=True):
                mine = owner == link.server
                payload = pack(np.array([rate], np.float32), rows[mine], grads[mine])
                sending = protocol.push(link.state, version=version, usable=usable)
                self._send(link, sending, payload)

    def _heard(self, link: ServerLink, reply: Reply, payload: np.ndarray | None) -> None:
        # A row's values are needed even if a newer version has arrived, so `takes` is ignored.
        if isinstance(reply, Answer) and reply.sequence in link.payloads:
            del link.payloads[reply.sequence]
            self._take(link, payload)
        self._settle(link, reply)
