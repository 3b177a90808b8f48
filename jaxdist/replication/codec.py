"""The conversion of entries to envelopes and back; an entry's arrays precede its state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxdist.param_server.consistency.contract import Clocks
from jaxdist.param_server.protocol.inbox import Inbox
from jaxdist.param_server.protocol.messages import Acknowledge, Refuse
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.replication.decision import Copied, LogEntry
from jaxdist.types import Json, PyTree
from jaxdist.wire.contract import Envelope, Op

Update = tuple[float, np.ndarray | None]
"""An update: the factor of the learning rate, and the merged change, or None if only the version
advances."""


def entry_envelopes(
    entry: LogEntry, server: int, tensor: int, updates: Sequence[Update]
) -> Iterator[Envelope]:
    """Yield the envelopes of an entry: one for each of its changes, then one for its state."""
    changes = [change for _, change in updates if change is not None]
    kept = [[rate, change is not None] for rate, change in updates]
    yield from _envelopes(entry, server, tensor, Op.COPY, changes, kept)


def snapshot_envelopes(
    entry: LogEntry, server: int, tensor: int, arrays: PyTree
) -> Iterator[Envelope]:
    """Yield the envelopes of an entry with all arrays: the raw leaves, then the state."""
    leaves = (_bytes(np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(arrays))
    yield from _envelopes(entry, server, tensor, Op.WHOLE, leaves, [])


def _envelopes(
    entry: LogEntry, server: int, tensor: int, op: Op, arrays: Iterable[np.ndarray], updates: Json
) -> Iterator[Envelope]:
    given = Envelope(op, entry.epoch, server, entry.index, tensor=tensor)
    for array in arrays:
        yield replace(given, payload=array)
    told = json.dumps({"state": _fields(entry.state), "updates": updates})
    yield replace(given, op=Op.ENTRY, flag=entry.whole, payload=_bytes(told.encode()))


def to_entry(envelope: Envelope) -> tuple[LogEntry, list[tuple[float, bool]]]:
    """Convert an envelope to an entry, with each update's rate and whether it has a change."""
    told: Any = json.loads(envelope.text)
    state = _state(told["state"])
    entry = LogEntry(envelope.epoch, envelope.sequence, state, whole=envelope.flag)
    return entry, [(rate, has) for rate, has in told["updates"]]


def of_copied(copied: Copied, tensor: int) -> Envelope:
    """Convert a follower's reply to an envelope, whose flag marks an index of -1."""
    index = max(copied.index, 0)
    return Envelope(
        Op.COPIED, copied.epoch, copied.server, index, flag=copied.index < 0, tensor=tensor
    )


def to_copied(envelope: Envelope) -> Copied:
    """Convert an envelope to a follower's reply; the inverse of `of_copied`."""
    index = -1 if envelope.flag else envelope.sequence
    return Copied(envelope.epoch, envelope.client, index)


def _bytes(raw: bytes) -> np.ndarray:
    return np.frombuffer(raw, np.uint8)


def _fields(state: RangeState) -> dict[str, Any]:
    clocks = state.clocks
    return {
        "epoch": state.epoch,
        "clocks": [clocks.team, clocks.version, clocks.floor],
        "members": [
            [one, clock, clocks.pushed.get(one, ())] for one, clock in clocks.clocks.items()
        ],
        "inboxes": [
            [client, inbox.expected, [_outcome(one) for one in inbox.outcomes.values()]]
            for client, inbox in state.inboxes.items()
        ],
    }


def _outcome(one: Acknowledge | Refuse) -> list[Any]:
    if isinstance(one, Acknowledge):
        return [one.sequence, one.version]
    return [one.sequence, one.reason, one.epoch]


def _state(fields: dict[str, Any]) -> RangeState:
    team, version, floor = fields["clocks"]
    members = {client: clock for client, clock, _ in fields["members"]}
    pushed = {client: tuple(times) for client, _, times in fields["members"] if times}
    inboxes: dict[int, Inbox] = {}
    for client, expected, outcomes in fields["inboxes"]:
        found = [
            Acknowledge(client, *one) if len(one) == 2 else Refuse(client, *one) for one in outcomes
        ]
        inboxes[client] = Inbox(expected, {}, {one.sequence: one for one in found})
    clocks = Clocks(team, members, version, floor, (), pushed)
    return RangeState(clocks, fields["epoch"], inboxes)
