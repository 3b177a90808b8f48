"""The replication of a range: a follower on another server has all that the leader acknowledged.

The leader processes messages as `jaxdist.param_server.protocol.server` describes. Each step that
settles a push or changes the members becomes an entry. An entry has the updates of the parameters
and the state of the protocol, including the outcomes that make a retry harmless. An update is sent
after aggregation, so it costs the bytes of a single worker's push. The leader holds back every
reply until all required followers have all earlier entries. Therefore a client never learns of a
result that a takeover could lose, and every version that a client has read exists after a takeover.

The arbiter, a part of the supervisor of a run, decides which server leads. Every server that starts
has a number that no server has had, even if it replaces a server that was given up. The arbiter
gives each leader a new epoch, and only a follower that has all acknowledged entries can become the
leader. A follower refuses the entries of older epochs, so an earlier leader that is still alive
cannot acknowledge anything more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxdist.param_server.protocol.messages import Acknowledge, Apply, Drop
from jaxdist.param_server.protocol.server import RangeState, Step, range_in_epoch


@dataclass(frozen=True)
class RangeView:
    """The view of a range: the arbiter's decision on the servers of the range.

    Attributes:
      number: the number of the decision; a server ignores a decision that is older than a decision
        that it knows.
      epoch: the epoch of the leader, which grows with each takeover.
      leader: the server that answers clients.
      follower: the server that has everything that the leader has acknowledged, or None without
        such a server.
      joining: the server to which the leader copies its state, and which becomes the follower
        afterwards, or None without such a server.
    """

    number: int
    epoch: int
    leader: int
    follower: int | None = None
    joining: int | None = None

    def failed(self, server: int, number: int) -> RangeView | None:
        """Return the view after a server's failure.

        The result is None if no remaining server has all that the leader acknowledged. The failure
        of a server that is not in this view changes nothing.

        Args:
          number: the number of the view in which the failure was seen. If another view has
            this number, the result is this view, because the server may have returned since then.

        >>> RangeView(0, 0, leader=1, follower=2).failed(1, number=0)
        RangeView(number=1, epoch=1, leader=2, follower=None, joining=None)
        """
        if number != self.number or server not in (self.leader, self.follower, self.joining):
            return self
        if server == self.leader:
            if self.follower is None:
                return None
            return RangeView(self.number + 1, self.epoch + 1, self.follower)
        follower = None if server == self.follower else self.follower
        joining = None if server == self.joining else self.joining
        return replace(self, number=self.number + 1, follower=follower, joining=joining)

    def joined_by(self, server: int) -> RangeView:
        """Return the view in which a server joins.

        The result is this view if the server leads, or if the view already has a follower or a
        joining server.
        """
        taken = self.follower is not None or self.joining is not None
        if taken or server == self.leader:
            return self
        return replace(self, number=self.number + 1, joining=server)

    def synced(self, server: int, number: int) -> RangeView:
        """Return the view in which a joining server has become the follower.

        Args:
          server: the server that has all acknowledged entries, according to the leader.
          number: the number of the view to which the leader's report refers. A report about another
            view or another server changes nothing.
        """
        if number != self.number or server != self.joining:
            return self
        return replace(self, number=self.number + 1, follower=server, joining=None)


@dataclass(frozen=True)
class LogEntry:
    """A step of the leader, in the form in which followers repeat the step.

    Attributes:
      index: the number of the entry; the numbers order the entries of all epochs.
      state: the state of the protocol after the step, in the form of `portable`.
      updates: the updates of the parameters, in order; the arrays of the updates travel with the
        entry.
      whole: whether the entry carries all arrays in place of updates, for a server that joins.
    """

    epoch: int
    index: int
    state: RangeState
    updates: tuple[Apply, ...] = ()
    whole: bool = False


@dataclass(frozen=True)
class Copied:
    """A follower's reply, which reports the entries that the follower has.

    Attributes:
      epoch: the epoch of the follower. If this epoch is newer than the leader's epoch, the follower
        refused the entry.
      index: the index of the follower's newest entry. The follower also has all earlier entries.
    """

    epoch: int
    server: int
    index: int


def portable(state: RangeState) -> RangeState:
    """Return the state as if the changes that wait for a merge had not arrived.

    Followers do not have the arrays of such changes. No client has had a reply to such a change, so
    each client sends its change to the next leader.
    """
    waiting: dict[int, tuple[int, int]] = {}
    for one in state.clocks.held:
        # The waiting changes of a client are in order, so `setdefault` keeps the first of them. The
        # client sends this change and all later changes again.
        waiting.setdefault(one.client, (one.sequence, one.clock))
    inboxes = {
        client: replace(inbox, expected=waiting.get(client, (inbox.expected,))[0], early={})
        for client, inbox in state.inboxes.items()
    }
    members = state.clocks.clocks
    clocks = {one: waiting[one][1] if one in waiting else members[one] for one in members}
    held = replace(state.clocks, clocks=clocks, held=())
    return RangeState(held, state.epoch, inboxes)


@dataclass(frozen=True)
class Leader:
    """A leader's state, which it replicates to its followers.

    Attributes:
      range: the state of the protocol.
      index: the index of the newest entry.
      has: for each server that copies the range, the index of its newest entry, or None while that
        server has no copy.
      entries: the entries that some server has not acknowledged.
      released: the largest value that `safe` has had so far.
      deposed: whether another server leads in a newer epoch.
    """

    view: RangeView
    range: RangeState
    index: int = 0
    has: Mapping[int, int | None] = field(default_factory=dict)
    entries: tuple[LogEntry, ...] = ()
    released: int = 0
    deposed: bool = False

    @property
    def safe(self) -> int:
        """The index of the newest entry to which replies may refer, since all followers have it."""
        if self.deposed:
            return self.released
        # A server that has no copy yet delays no reply.
        return min((at for at in self.has.values() if at is not None), default=self.index)

    @property
    def synced(self) -> int | None:
        """The joining server, or None if that server lacks an acknowledged entry or none joins."""
        joining = self.view.joining
        if self.deposed or joining is None:
            return None
        at = self.has.get(joining)
        return joining if at is not None and at >= self.released else None

    def stepped(self, step: Step) -> Leader:
        """Return the leader after a step of the protocol, with an entry if followers need it."""
        before, after = self.range, step.state
        settles = any(isinstance(one, Apply | Acknowledge | Drop) for one in step.effects)
        same = after is before or (not settles and before.members == after.members)
        found = replace(self, range=after)
        if same or not self.has:
            # The index advances even without followers, since a server that joins later needs the
            # index.
            return found if same else replace(found, index=self.index + 1)._noted()
        updates = tuple(one for one in step.effects if isinstance(one, Apply))
        entry = LogEntry(self.view.epoch, self.index + 1, portable(after), updates)
        return replace(found, index=entry.index, entries=(*self.entries, entry))._noted()

    def snapshot(self) -> LogEntry:
        """Return an entry with all arrays, for the joining server."""
        return LogEntry(self.view.epoch, self.index, portable(self.range), whole=True)

    def copied(self, reply: Copied) -> Leader:
        """Return the leader after a follower's reply, which may permit replies to clients."""
        if reply.epoch > self.view.epoch:
            return replace(self, deposed=True, entries=())
        if reply.epoch < self.view.epoch or reply.server not in self.has or reply.index < 0:
            return self
        known = self.has[reply.server]
        has = {**self.has, reply.server: max(reply.index, -1 if known is None else known)}
        found = replace(self, has=has)
        # A server without a copy counts as index 0, because it will need all entries after its
        # snapshot.
        least = min(at or 0 for at in has.values())
        return replace(found, entries=tuple(e for e in self.entries if e.index > least))._noted()

    def viewed(self, view: RangeView, server: int) -> Leader:
        """Return the leader after a decision of the arbiter.

        The decision deposes this leader if another server leads.

        Args:
          server: the number of this server.
        """
        if view.number <= self.view.number:
            return self
        if (view.epoch, view.leader) != (self.view.epoch, server):
            return replace(self, view=view, deposed=True, entries=())
        wanted = [one for one in (view.follower, view.joining) if one is not None]
        has = {one: self.has.get(one) for one in wanted}
        return replace(self, view=view, has=has)._noted()

    def _noted(self) -> Leader:
        return replace(self, released=max(self.released, self.safe))


@dataclass(frozen=True)
class Follower:
    """The state of a follower, or of a server that joins.

    Attributes:
      epoch: the newest epoch that the server knows of.
      index: the index of the newest entry, or -1 before the first copy.
      range: the state of the protocol after the newest entry, or None before the first copy.
    """

    server: int
    epoch: int = 0
    index: int = -1
    range: RangeState | None = None

    def follow(self, entry: LogEntry) -> tuple[Follower, bool]:
        """Return the follower after an entry, and whether the server must take the entry's arrays.

        The answer to the leader is `copied`, for an entry that is taken, repeated or refused.
        """
        if entry.epoch < self.epoch:
            return self, False
        # The epoch is stored even if the entry does not follow the newest entry of this server,
        # since entries of an earlier leader must be refused from now on.
        found = replace(self, epoch=entry.epoch)
        follows = self.range is not None and entry.index == self.index + 1
        if not (entry.index > self.index if entry.whole else follows):
            return found, False
        return replace(found, index=entry.index, range=entry.state), True

    @property
    def copied(self) -> Copied:
        """The follower's reply to the leader, about its newest entry."""
        return Copied(self.epoch, self.server, self.index)

    def takes_over(self, view: RangeView) -> Leader:
        """Return this server as the leader of a new view, with all that was acknowledged."""
        assert self.range is not None, "a server without a copy cannot lead"
        assert view.epoch > self.range.epoch, f"epoch {view.epoch} after {self.range.epoch}"
        state = range_in_epoch(self.range, view.epoch)
        return Leader(view, state, self.index, released=self.index)
