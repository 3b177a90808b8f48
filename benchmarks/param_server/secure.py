"""The time of secure aggregation, compared with plain aggregation of the same vectors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from benchmarks.core.report import Figure
from jaxdist.secure.masks import decode, encode
from jaxdist.secure.protocol import SecureClient, SecureSum, threshold

CLIENTS = (10, 100)
VALUES = 1_000_000
T = TypeVar("T")


def figures(clients: tuple[int, ...] = CLIENTS, values: int = VALUES) -> list[Figure]:
    """Measure the CPU seconds of a round, of which a tenth of the clients drop out."""
    return [figure for count in clients for figure in _round(count, values)]


def _round(count: int, values: int) -> list[Figure]:
    dropouts = count // 10
    needed = threshold(count, dropouts)
    team = [SecureClient(number, needed) for number in range(count)]
    roster = {number: one.keys for number, one in enumerate(team)}
    keys, shares = _timed(lambda: [one.shares(roster) for one in team])
    to = [{sender: one[number] for sender, one in enumerate(shares)} for number in range(count)]
    x = np.random.default_rng(0).normal(size=values).astype(np.float32)
    push, masked = _timed(lambda: team[0].masked(encode(x, count), to[0]))
    server = SecureSum(roster, needed, values)
    arrived = range(count - dropouts)
    # The time of a sum does not depend on the values, so all clients push the same vector.
    adding, _ = _timed(lambda: [server.add(number, masked) for number in arrived])
    for number in range(1, count):
        team[number].masked(np.zeros(1, np.uint64), to[number])
    revealed = {number: team[number].reveal(server.arrived) for number in arrived}
    removing, _ = _timed(lambda: decode(server.total(revealed)))
    plain_push, _ = _timed(x.copy)
    total = np.zeros(values, np.float32)
    plain, _ = _timed(lambda: [np.add(total, x, out=total) for _ in arrived])
    note = f"{values:,} values, {dropouts} of {count} clients drop out; CPU seconds"
    return [
        Figure(f"{count} clients: keys and shares, to a push", keys / count, push, note=note),
        Figure(f"{count} clients: push of one, to a plain copy", push, plain_push, note=note),
        Figure(f"{count} clients: the server's sum, to plain", adding + removing, plain, note=note),
        Figure(
            f"{count} clients: bytes of a push", masked.nbytes, x.nbytes, unit="bytes", note=note
        ),
    ]


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    begun = time.process_time()
    found = work()
    return time.process_time() - begun, found
