"""The bench of tables on servers: bytes of a step, memory and lookups of a server, and kills."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.core.harness import REPEATS
from benchmarks.core.report import Figure, Report
from jaxdist.models.recommend.rows import RowForm
from jaxdist.tables.keys import KEY
from jaxdist.tables.optimizer import RowAdagrad
from jaxdist.tables.store import RowStore

WIDTH = 16
ROWS = 50_000_000
"""Rows of a table, of which one of two servers holds half."""
PART = 100_000


def bench(repeats: int = REPEATS) -> Report:
    """Count bytes and memory of tables on servers, and kill servers.

    Args:
      repeats: timed pairs of lookups and of updates.
    """
    # Imported here, so that the list of all benches does not need the extra param-server.
    from benchmarks.param_server.tables import figures

    return Report("hybrid", [*step_bytes(), *store_figures(repeats), *figures()])


def step_bytes(unique: int = 60) -> list[Figure]:
    """Compare the payloads of a step of one client with the formula and with dense servers."""
    from benchmarks.param_server.tables import FORM, table_servers

    rows = np.sort(np.random.default_rng(0).choice(FORM.rows, unique, replace=False))
    keys = np.zeros(unique, KEY)
    keys["id"] = rows % FORM.fields["user"]
    keys = np.unique(keys)
    counted: list[int] = []
    for asked, most in ((rows.astype(np.uint32), None), (keys, 4096)):
        with table_servers(most_rows=most) as (_, (client,)):
            values = client.pull(asked)
            client.push(asked, values + 1, 1.0)
            client.drain()
            counted.append(client.sent_bytes + client.received_bytes)
    found, kept = counted
    by_id = len(keys) * (2 * KEY.itemsize + 2 * 4 * FORM.width)
    formula, dense = unique * (8 + 2 * 4 * FORM.width), 2 * 4 * FORM.rows * FORM.width
    note = f"{unique} unique rows of {FORM.rows}, {FORM.width} wide, on 2 servers; rows x (8 + 8 D)"
    return [
        Figure("payloads of a step", found, formula, "<= 1.02", "B", note),
        Figure(
            "payloads of a step with 64-bit ids",
            kept,
            by_id,
            "<= 1.02",
            "B",
            f"{len(keys)} unique rows, at most 4,096 kept; rows x (24 + 8 D)",
        ),
        Figure(
            "payloads of a step, beside dense servers", found, dense, "", "B", "2 x 4 x all values"
        ),
    ]


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def store_figures(repeats: int) -> list[Figure]:
    """Measure memory, lookups and updates of a server that holds half of the rows."""
    optimizer = RowAdagrad(learning_rate=0.1)
    store = RowStore(RowForm({"id": ROWS}, WIDTH, 0.1), optimizer, 0, servers=2)
    draws, count = np.random.default_rng(0), ROWS // 2
    order = draws.permutation(count)[: int(0.9 * count)].astype(np.uint32) * 2
    grads = np.ones((PART, WIDTH), np.float32)
    before = _resident()
    for at in range(0, len(order), PART):
        part = order[at : at + PART]
        store.update(part, grads[: len(part)], 0.1)
    memory, rows = _resident() - before, store.touched * store.columns * 4
    asked = draws.choice(order, PART, replace=False)
    places = draws.permutation(store.touched)[:PART]
    table = store.kept()[1]

    def plain() -> None:
        found = table[places]
        optimizer.update(found, grads, 0.1)
        table[places] = found

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "lookups": (lambda: store.read(asked), lambda: table[places, :WIDTH]),
        "updates": (lambda: store.update(asked, grads, 0.1), plain),
    }
    note = f"{store.touched} of {count} rows touched in random order, {WIDTH} wide with Adagrad"
    return [
        Figure("memory of a server", memory / 2**20, rows / 2**20, "<= 1.15", "MiB", note),
        *(_rate(name, ours, numpy, repeats) for name, (ours, numpy) in pairs.items()),
    ]


def _rate(
    name: str, ours: Callable[[], object], other: Callable[[], object], repeats: int
) -> Figure:
    """Compare the rates of two functions of the same rows, in CPU seconds, in turns."""
    seconds: list[list[float]] = [[], []]
    for _ in range(repeats):
        for function, into in zip((ours, other), seconds, strict=True):
            begun = time.process_time()
            function()
            into.append(time.process_time() - begun)
    ours_rate, other_rate = (PART / sorted(one)[len(one) // 2] / 1e6 for one in seconds)
    note = f"{PART} rows; the reference is numpy's fancy indexing; CPU seconds, in turns"
    return Figure(f"{name} of a server core", ours_rate, other_rate, ">= 0.5", "M rows/s", note)
