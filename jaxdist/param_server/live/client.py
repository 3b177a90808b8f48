"""A worker's client of all servers, which exchanges messages while the worker computes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxdist.param_server.consistency.contract import Consistency
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.live.codes import Codes, PushEncoder
from jaxdist.param_server.live.exchange import ServerLink
from jaxdist.param_server.live.layout import ShardLayout
from jaxdist.param_server.live.linked import LinkedClient, Timeouts
from jaxdist.param_server.protocol import client as protocol
from jaxdist.param_server.protocol.messages import Reply
from jaxdist.wire.contract import Wire


class Client(LinkedClient):
    """A worker's sessions with all servers: a context manager, used by one thread.

    Args:
      number: the client number.
      model: the consistency model of the servers, or of a rack's aggregators.
      wires: the connections to the servers, or to aggregators in front of them, in the order of the
        layouts.
      codes: the encoding of pushes to each server, or () for uncompressed pushes.
      through: the prefix of the servers' names in error messages, for wires through aggregators.
    """

    def __init__(
        self,
        number: int,
        model: Consistency,
        layouts: Sequence[ShardLayout],
        wires: Sequence[Wire],
        *,
        codes: Sequence[Codes] = (),
        epoch: int = 0,
        patience: Timeouts | None = None,
        through: str = "",
    ) -> None:
        self._encoders = [PushEncoder(one, number) for one in codes]
        names = [(layout.server, f"{through}server {layout.server}") for layout in layouts]
        super().__init__(number, model, names, wires, epoch=epoch, patience=patience)

    def read(self) -> list[np.ndarray]:
        """Wait until the worker may compute from its copies of all shards, and return the copies.

        Raises:
          RunError: the deadline passed, and the message names the late processes; or a server
            refused a message.
        """
        with self._changed:
            self._wait(self._ready, "parameters to compute from")
            if self._read[0] is None and isinstance(self.model, BSP):
                self._catch_up()
            if self.model.ahead:
                self._pull(ready=True)
            copies = [link.copy for link in self._links]
            self._read = [link.state.version for link in self._links]
        return [copy for copy in copies if copy is not None]

    def _catch_up(self) -> None:
        """Push zeros to each server that is a round behind another server.

        At the moment when this worker joins, the servers may be in different rounds. The worker
        must be in the same round at all servers, or its last push would wait for ever.
        """
        while any(link.state.clock < self._newest for link in self._links):
            for at, link in enumerate(self._links):
                if link.state.clock < self._newest:
                    assert link.copy is not None
                    self._push_to(at, np.zeros_like(link.copy), None, 0.0)
            self._wait(self._ready, "the servers to be in the same round")

    @property
    def _newest(self) -> int:
        return max(link.state.clock for link in self._links)

    def _ready(self) -> bool:
        # Each check tries to pull again, since no pull is sent on a link that has too many pending
        # messages.
        self._pull(ready=False)
        return all(protocol.ready(self.model, link.state) for link in self._links)

    def _pull(self, *, ready: bool) -> None:
        for link in self._links:
            state = link.state
            if protocol.ready(self.model, state) == ready and not state.pulling and state.room:
                link.state, message = protocol.pull(state)
                link.send(message)

    def push(self, changes: Sequence[np.ndarray], *, tokens: float = 1.0) -> None:
        """Send changes that were computed from the last read.

        The call waits only if too many messages are pending.

        The arrays of the changes must not be modified afterwards.

        Raises:
          RunError: the deadline passed, or a server refused a message, as for `read`.
        """
        with self._changed:
            self._wait_for_room()
            clock = self.clock
            for at, (change, read) in enumerate(zip(changes, self._read, strict=True)):
                self._push_to(at, change, read, tokens, clock)

    def _push_to(
        self, at: int, change: np.ndarray, read: int | None, tokens: float, clock: int | None = None
    ) -> None:
        link = self._links[at]
        change, usable = self._written(at, change, tokens)
        # Servers refuse a weight that is not finite; `_written` has already marked this push as
        # unusable.
        tokens = tokens if math.isfinite(tokens) else 1.0
        sending = protocol.push(link.state, clock=clock, version=read, tokens=tokens, usable=usable)
        self._send(link, sending, change)

    def _written(self, at: int, change: np.ndarray, tokens: float) -> tuple[np.ndarray, bool]:
        """Return a change in the form that is sent, and whether the push is to be marked as usable.

        Servers check uncompressed changes for values that are not finite. A change with 0 tokens
        may be 0/0. Zeros are sent instead, without the encoder: servers would not apply the change,
        and the encoder's error feedback would be lost with the change. Zeros are also sent if the
        number of tokens is not finite.

        Args:
          at: the index of the server.
          change: the change of the server's shard.
          tokens: the weight of the change.
        """
        if tokens == 0 or not math.isfinite(tokens):
            spec = self._encoders[at].codes.spec if self._encoders else None
            zeros = np.zeros_like(change) if spec is None else np.zeros(spec.length, spec.dtype)
            return zeros, tokens == 0
        if not self._encoders:
            return change, True
        return self._encoders[at](change, self._links[at].state.sequence)

    def under_way(self, server: int) -> list[np.ndarray]:
        """Return the changes that a server has not settled, as the server will decode them."""
        with self._changed:
            sent = dict(self._links[server].payloads)
        if not self._encoders:
            return list(sent.values())
        codes = self._encoders[server].codes
        return [codes.decode(payload, self.number, at) for at, payload in sent.items()]

    def _heard(self, link: ServerLink, reply: Reply, payload: np.ndarray | None) -> None:
        if self._settle(link, reply).takes:
            self._take(link, payload)
