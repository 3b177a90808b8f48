"""The server of tables: the protocol of parameter servers, with pulls and pushes of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdist.param_server.consistency.contract import Arrival, Merge
from jaxdist.param_server.live.server import Server
from jaxdist.param_server.protocol.messages import Answer, Reply
from jaxdist.replication.server import ReplicatedServer
from jaxdist.tables.keys import row_dtype
from jaxdist.tables.messages import pack, payload_spec, spec_of_message, unpack_push
from jaxdist.tables.store import RowStore, summed
from jaxdist.wire.contract import Envelope, Op, Peer, Spec


@dataclass(frozen=True)
class TableLayout:
    """The number of a table server and the `Spec` of its payloads, instead of a `ShardLayout`."""

    server: int
    spec: Spec


class TableShard:
    """The rows of a server, with the interface of `jaxdist.param_server.live.shard.ServerShard`.

    Args:
      store: the rows.
      most_rows: the largest number of rows in a message, and in the sum of all pushes of a round.

    Attributes:
      staleness: the number of changes for each staleness.
      square: the squared norm of the last applied change.
      moved: the last applied change, as the payload of a push, or None before the first change.
    """

    def __init__(self, store: RowStore, most_rows: int) -> None:
        self.store, self.kind = store, row_dtype(store.form.most)
        spec = payload_spec(store.server, most_rows, store.form.width, self.kind)
        self.layout = TableLayout(store.server, spec)
        self.staleness: Counter[int] = Counter()
        self.square = 0.0
        self.moved: np.ndarray | None = None

    def read(self, client: int, version: int) -> None:
        """Do nothing: `TableServer` reads the rows of a pull when it sends the answer."""

    def forget(self, client: int) -> None:
        """Do nothing, because no version of a row is kept for a worker."""

    def apply(self, merge: Merge, change_of: Callable[[Arrival], np.ndarray]) -> None:
        """Apply a merge of pushes, in one update of all their rows.

        Args:
          change_of: a function from an arrival to the payload of its push.
        """
        if not merge.parts:
            return
        rates, rows, grads = [], [], []
        for part in merge.parts:
            self.staleness[part.staleness] += 1
            found = self.unpacked(change_of(part.arrival))
            assert found is not None, "a push is checked when it arrives"
            rates.append(found[0])
            rows.append(found[1])
            grads.append(found[2] if part.weight == 1 else found[2] * np.float32(part.weight))
        unique, total = summed(np.concatenate(rows), np.concatenate(grads))
        total = total if merge.total == 1 else total / np.float32(merge.total)
        self.move(pack(np.array([max(rates)], np.float32), unique, total), merge.rate)

    def move(self, change: np.ndarray, rate: float) -> None:
        """Apply a merged change to the rows.

        Args:
          change: the change, as the payload of a push.
          rate: the factor by which the learning rate in the change is multiplied.
        """
        found = self.unpacked(change)
        assert found is not None, "a change has the form of a push"
        self.moved = change
        self.square = float(np.square(found[2]).sum())
        self.store.update(found[1], found[2], found[0] * rate)

    def unpacked(self, push: np.ndarray) -> tuple[float, np.ndarray, np.ndarray] | None:
        """Return the rate, rows and gradients of a push, or None if its length is not valid."""
        return unpack_push(push, self.store.form.width, self.kind)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The touched rows, and their values with state; the next update changes these arrays."""
        return self.store.kept()

    def restore(self, raw: Sequence[np.ndarray]) -> None:
        """Store the rows of another server, given the bytes of its `arrays`."""
        rows, values = raw[0].view(self.kind), raw[1].view(np.float32)
        self.store.load(rows, values.reshape(len(rows), self.store.columns))


class TableServer(Server):
    """A server from which the workers of a run pull rows, and to which they push gradients.

    Args:
      given, more: the arguments of the base class, with a `TableShard` as the shard.
    """

    def __init__(self, *given: Any, **more: Any) -> None:
        self._wanted: dict[int, np.ndarray] = {}
        self.rows_pulled = 0
        super().__init__(*given, **more)

    @property
    def store(self) -> RowStore:
        """The store of this server's table rows."""
        return self._table.store

    @property
    def _table(self) -> TableShard:
        shard: Any = self.shard
        return shard

    def spec(self, envelope: Envelope) -> Spec | None:
        """Return the form of a message's payload, or None without a payload.

        Pulls also have payloads.
        """
        super().spec(envelope)
        return spec_of_message(envelope, self._spec)

    def _received(self, peer: Peer, envelope: Envelope, finite: bool) -> None:
        payload = envelope.payload
        if payload is not None:
            reason = self._problem(envelope.op, payload)
            if reason is not None:
                self._refuse(peer, envelope, reason)
                return
        super()._received(peer, envelope, finite)

    def _problem(self, op: Op, payload: np.ndarray) -> str | None:
        """Return why a message is refused, or None if it is well formed."""
        kind = self._table.kind
        if op is Op.PULL:
            if payload.size % kind.itemsize:
                return (
                    f"a pull of {payload.size} bytes is not a multiple of the {kind.itemsize} "
                    "bytes of a row number: start workers and servers from the same config"
                )
            return self.store.problem(payload.view(kind))
        found = self._table.unpacked(payload)
        if found is None:
            return (
                f"a push of {payload.size} bytes does not fit the tables of this server, whose "
                f"width is {self.store.form.width}: start workers and servers from the same config"
            )
        return self.store.problem(found[1])

    def _keep(self, envelope: Envelope) -> None:
        if envelope.op is not Op.PULL:
            super()._keep(envelope)
        elif envelope.payload is not None:
            # The rows of the pull are stored even if the pull is repeated, which happens if its
            # answer was lost.
            self._wanted[envelope.client] = envelope.payload.view(self._table.kind)

    def _reply(self, reply: Reply, payload: np.ndarray | None = None) -> None:
        if isinstance(reply, Answer):
            rows = self._wanted.pop(reply.client, np.empty(0, self._table.kind))
            self.rows_pulled += len(rows)
            payload = np.ascontiguousarray(self.store.read(rows)).reshape(-1).view(np.uint8)
        super()._reply(reply, payload)

    def kept(self, most: int = -1) -> tuple[bool, np.ndarray, np.ndarray]:
        """Return copies of the rows to save, and of their values with state.

        Args:
          most: the largest number of rows for an incremental result. If at most this number of rows
            were updated since the last call, only these rows are returned.

        Returns:
          A bool, the row numbers, and the values. The bool is true if all touched rows are
          returned.
        """
        with self._changed:
            rows, values = self.store.kept()
            changed = self.store.changed()
            self.store.settle()
            if len(changed) > most:
                return True, rows.copy(), values.copy()
            return False, rows[changed], values[changed]


class ReplicatedTables(TableServer, ReplicatedServer):
    """A table server whose rows have a follower on another server.

    The values of an answer are read before the answer waits for the follower. Values that were read
    later could include updates that the follower does not have, and that could be lost.
    """
