"""Replicated ranges: nothing acknowledged is lost or doubled, whoever crashes or is cut off."""

from __future__ import annotations

from dataclasses import replace

import pytest
from replica_world import World

from jaxdist.param_server.consistency.arrival import SSP, Asynchronous
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.protocol import server as protocol
from jaxdist.param_server.protocol.inbox import Inbox
from jaxdist.param_server.protocol.messages import Pull, Push, Stamp
from jaxdist.replication import decision as replica
from jaxdist.replication.decision import Copied, Leader, RangeView, portable

MODELS = {
    "bsp": BSP(),
    "bsp with backups": BSP(backups=1),
    "ssp": SSP(bound=2, reads="each_clock"),
    "eager": SSP(bound=2, reads="eager"),
    "async": Asynchronous(),
    "ahead": Asynchronous(reads="ahead"),
}


@pytest.mark.parametrize("seeds", [40, pytest.param(1700, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(3)
def test_nothing_acknowledged_is_lost_or_doubled_and_no_version_goes_back(name, seeds):
    takeovers = swaps = lost = 0
    for seed in range(seeds):
        world = World(MODELS[name], seed).run()
        world.check()
        takeovers, lost = takeovers + world.takeovers, lost + world.lost
        swaps += world.swaps
    assert takeovers > seeds / 4
    assert swaps
    assert lost < seeds / 4


def too_early(monkeypatch):
    """Replies go out when the leader has applied a push, before the follower has it."""
    monkeypatch.setattr(Leader, "safe", property(lambda self: self.index))


def without_outcomes(monkeypatch):
    """The follower does not learn which messages were settled."""

    def forgetful(state):
        found = portable(state)
        return replace(found, inboxes=dict.fromkeys(found.inboxes, Inbox()))

    monkeypatch.setattr(replica, "portable", forgetful)


def without_epochs(monkeypatch):
    """A leader counts the answers of a server that leads in a newer epoch."""
    taken = Leader.copied

    def copied(self, reply):
        return taken(self, replace(reply, epoch=self.view.epoch))

    monkeypatch.setattr(Leader, "copied", copied)


def with_what_waits(monkeypatch):
    """The follower believes that it has the changes that wait for a round."""
    monkeypatch.setattr(replica, "portable", lambda state: replace(state, reads=()))


def forgets_what_overtook(monkeypatch):
    """A joining server follows although it lacks what was answered before its first copy."""
    stepped = Leader.stepped

    def forgetful(self, step):
        return replace(stepped(self, step), released=self.released)

    monkeypatch.setattr(Leader, "stepped", forgetful)


def synced_too_early(monkeypatch):
    """A server that joins follows as soon as it is asked to."""
    monkeypatch.setattr(Leader, "synced", property(lambda self: self.view.joining))


@pytest.mark.parametrize(
    ("broken", "name"),
    [(too_early, "async"), (without_outcomes, "async"), (without_epochs, "async"),
     (with_what_waits, "bsp"), (synced_too_early, "async"),
     (forgets_what_overtook, "async")],
)  # fmt: skip
def test_what_is_broken_shows(broken, name, monkeypatch):
    broken(monkeypatch)

    def histories():
        for seed in range(300):
            World(MODELS[name], seed).run().check()

    with pytest.raises((AssertionError, KeyError)):
        histories()


def test_reports_of_an_earlier_view_change_nothing():
    view = RangeView(4, 1, leader=2, follower=3)
    assert view.failed(2, number=3) is view.failed(7, number=4) is view
    assert view.joined_by(5) is view
    alone = view.failed(3, number=4)
    assert alone == RangeView(5, 1, leader=2)
    assert alone.failed(2, number=5) is None
    joining = alone.joined_by(8)
    assert (joining.synced(8, number=5), joining.synced(3, number=6)) == (joining, joining)
    assert joining.synced(8, number=6) == RangeView(7, 1, leader=2, follower=8)
    assert joining.failed(8, number=6) == RangeView(7, 1, leader=2)


def test_a_round_that_is_open_is_left_to_the_next_leader():
    """A change that waits for others has no reply: its client sends it again."""
    world = World(BSP(), 0, workers=2, faults=False)
    leader = world.nodes[0]
    for sequence, message in enumerate([Pull(Stamp(0, 0, 0)), Push(Stamp(0, 0, 1), 0, 0)]):
        leader.payloads[0, sequence] = sequence
        world.do(leader, protocol.receive(world.model, leader.role.range, message))
    assert (leader.role.range.inboxes[0].expected, leader.role.range.clocks.clocks[0]) == (2, 1)
    found = portable(leader.role.range)
    assert (found.inboxes[0].expected, found.clocks.clocks[0], found.clocks.held) == (1, 0, ())


def test_a_server_that_joins_follows_once_it_has_what_was_answered_in_the_meantime():
    """Until its first answer nothing waits for it, so that replies overtake its copy."""
    world = World(Asynchronous(), 0, workers=1, faults=False)
    leader = Leader(RangeView(0, 0, leader=0), world.nodes[0].role.range)
    leader = leader.viewed(RangeView(1, 0, leader=0, joining=5), 0)
    copied = leader.snapshot().index
    for message in Pull(Stamp(0, 0, 0)), Push(Stamp(0, 0, 1), 0, 0), Push(Stamp(0, 0, 2), 1, 0):
        leader = leader.stepped(protocol.receive(world.model, leader.range, message))
    assert leader.safe == leader.index == copied + 2
    leader = leader.copied(Copied(0, 5, copied))
    assert (leader.safe, leader.synced) == (copied, None)
    leader = leader.copied(Copied(0, 5, copied + 2))
    assert leader.synced == 5
