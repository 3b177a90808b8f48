"""A server that leads a range: a reply waits until followers have the reported changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from jaxdist.param_server.consistency.contract import Consistency
from jaxdist.param_server.live.server import Server
from jaxdist.param_server.live.shard import ServerShard
from jaxdist.param_server.protocol import server as protocol
from jaxdist.param_server.protocol.messages import Apply, Message, Reply
from jaxdist.replication import codec
from jaxdist.replication.codec import Update
from jaxdist.replication.decision import Copied, Leader, RangeView
from jaxdist.replication.links import CopyLink
from jaxdist.wire.contract import Wire


class ReplicatedServer(Server):
    """A `jaxdist.param_server.live.server.Server` whose range has a follower on another server.

    Args:
      number: the number of this server.
      leader: the state of the replication.
      synced: the function that is called with the number of a server and the number of the view, as
        soon as that server may follow.
    """

    def __init__(
        self,
        number: int,
        shard: ServerShard,
        model: Consistency,
        leader: Leader,
        synced: Callable[[int, int], None],
        **more: Any,
    ) -> None:
        self.number, self.leader, self._synced = number, leader, synced
        self._held: deque[tuple[int, Reply, np.ndarray | None]] = deque()
        self._links: dict[int, CopyLink] = {}
        self._updates: list[Update] = []
        self._sent: dict[int, list[Update]] = {}
        self._told: tuple[int, int] | None = None
        super().__init__(shard, model, leader.range, **more)

    def viewed(self, view: RangeView, wires: Mapping[int, Wire]) -> None:
        """Carry out a decision of the arbiter: copy the range to the followers of the view.

        Args:
          wires: the wires to the servers of the view that copy the range, by server.
        """
        with self._changed:
            self.leader = self.leader.viewed(view, self.number)
            for server in [one for one in self._links if one not in self.leader.has]:
                self._links.pop(server).close()
            for server in self.leader.has:
                if server not in self._links:
                    opened = partial(self._opened, server)
                    self._links[server] = CopyLink(wires[server], opened, self._copied)
            self._advance()

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        super().close()

    def _opened(self, server: int, link: CopyLink) -> None:
        """At the beginning of a follower's session, send the entries that the follower lacks."""
        with self._changed:
            at = self.leader.has.get(server)
            tensor = self._spec.tensor
            if at is None:
                entry = self.leader.snapshot()
                link.send(codec.snapshot_envelopes(entry, self.number, tensor, self.shard.arrays))
                at = entry.index
            for entry in self.leader.entries:
                if entry.index > at:
                    updates = self._sent[entry.index]
                    link.send(codec.entry_envelopes(entry, self.number, tensor, updates))

    def _copied(self, reply: Copied) -> None:
        with self._changed:
            self.leader = self.leader.copied(reply)
            self._advance()

    def _late(self) -> str:
        behind = [one for one, at in self.leader.has.items() if (at or 0) < self.leader.index]
        if not self._held or not behind:
            return super()._late()
        return f"server {', '.join(map(str, behind))}, which copies what it holds"

    def _join(self, client: int) -> None:
        if not self.leader.deposed:
            super()._join(client)

    def _message(self, message: Message) -> None:
        if not self.leader.deposed:
            super()._message(message)

    def _resume(self, client: int, sequence: int) -> None:
        # This server may have taken over, and then does not know of the client's earlier pulls.
        self._done(protocol.resume(self.model, self.state, client, sequence, self.seconds))

    def _done(self, found: protocol.Step) -> None:
        # The leader's state changes first: `super()._done` calls `_apply`, which collects the
        # updates of the new entry, and `_reply`, which holds replies back until followers have this
        # entry.
        before = self.leader.index
        self.leader, self._updates = self.leader.stepped(found), []
        super()._done(found)
        if self.leader.entries and self.leader.entries[-1].index > before:
            entry = self.leader.entries[-1]
            self._sent[entry.index] = self._updates
            for link in self._links.values():
                link.send(
                    codec.entry_envelopes(entry, self.number, self._spec.tensor, self._updates)
                )
        self._advance()

    def _apply(self, effect: Apply) -> None:
        super()._apply(effect)
        change = self.shard.moved if effect.merge.parts else None
        self._updates.append((effect.merge.rate, change))

    def _reply(self, reply: Reply, payload: np.ndarray | None = None) -> None:
        # Every reply waits, even a reply to a pull, because the version in the reply must survive a
        # takeover.
        self._held.append((self.leader.index, reply, payload))

    def _advance(self) -> None:
        """Send the replies for which all followers have the entries, and drop these entries.

        If the leader is deposed, close its sessions. If a joining server has all acknowledged
        entries, report that the server may follow.
        """
        while self._held and self._held[0][0] <= self.leader.safe:
            _, reply, payload = self._held.popleft()
            super()._reply(reply, payload)
        kept = {entry.index for entry in self.leader.entries}
        self._sent = {index: one for index, one in self._sent.items() if index in kept}
        if self.leader.deposed:
            for peer in [*self._peers.values()]:
                peer.close()
        joined = self.leader.synced
        if joined is not None and self._told != (joined, self.leader.view.number):
            self._told = joined, self.leader.view.number
            self._synced(*self._told)
