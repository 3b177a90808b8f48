"""The pushes that a server received, read from its log, or from the logs of all racks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.consistency.contract import Merge
from jaxdist.param_server.live.order import ProtocolCall, rack_step
from jaxdist.param_server.protocol.messages import Answer, Push
from jaxdist.param_server.protocol.rack import Forward, RackEffect, begin_rack

Key = tuple[int, int]
"""A worker's client number and a clock, which identify a change; each server received a part of
the change."""
_Answered = tuple[tuple[int, int], int]
"""The sequence and the clock of an answer, and the version of its parameters."""


@dataclass
class Received:
    """The pushes of workers to one server, directly or through racks.

    Attributes:
      pushes: the pushes of workers, by client and clock.
      versions: the server's versions from which the workers computed, by client and clock.
      rounds: the sequence and the merge of each push of a rack, oldest first, by the client number
        of the rack.
    """

    pushes: dict[Key, Push] = field(default_factory=dict)
    versions: dict[Key, int] = field(default_factory=dict)
    rounds: dict[int, deque[tuple[int, Merge]]] = field(default_factory=dict)

    def take(self, log: Iterable[ProtocolCall]) -> None:
        """Add the pushes in the log of a server or a rack."""
        for taken in log:
            if isinstance(push := taken.message, Push):
                self.pushes[push.stamp.client, push.clock] = push


def received_directly(log: Iterable[ProtocolCall]) -> Received:
    """Return the pushes in the log of a server."""
    found = Received()
    found.take(log)
    found.versions = {key: push.version for key, push in found.pushes.items()}
    return found


def received_through_racks(cluster: Cluster, logs: Sequence[Iterable[ProtocolCall]]) -> Received:
    """Return the pushes in the logs of all racks for one server.

    The versions in the pushes of workers are rounds of the rack. The server's versions follow from
    the rack's protocol, which is repeated here without arrays.
    """
    found = Received()
    for number, (workers, log) in enumerate(zip(cluster.racks, logs, strict=True)):
        calls = list(log)
        found.take(calls)
        numbers, answered = count(number, len(cluster.racks)), dict[int, _Answered]()
        state = begin_rack(next(numbers), len(workers))
        for taken in calls:
            if isinstance(push := taken.message, Push) and push.stamp.client in answered:
                # A push for a round that was over here has an earlier clock than its parameters.
                _, copy = answered[push.stamp.client]
                found.versions.setdefault((push.stamp.client, push.clock), copy)
            state, effects, _ = rack_step(cluster.consistency, state, taken)
            _rack_did(found, effects, state.outer.version, answered)
            if taken.kind == "leave" and not state.inner.members:
                state = begin_rack(next(numbers), len(workers))
    return found


def _rack_did(
    found: Received, effects: Iterable[RackEffect], copy: int | None, answered: dict[int, _Answered]
) -> None:
    """Record the forwarded rounds of a rack, and the version that each worker receives.

    Args:
      copy: the version of the rack's copy, or None before the first copy.
      answered: the newest answer of each client. A repeated answer has the parameters of the first
        answer.
    """
    for effect in effects:
        if isinstance(effect, Forward):
            sent = effect.message.stamp
            found.rounds.setdefault(sent.client, deque()).append((sent.sequence, effect.merge))
        elif isinstance(effect, Answer):
            now = effect.sequence, effect.clock
            if effect.client not in answered or now > answered[effect.client][0]:
                assert copy is not None, "an answer has parameters"
                answered[effect.client] = now, copy
                found.versions[effect.client, effect.clock] = copy
