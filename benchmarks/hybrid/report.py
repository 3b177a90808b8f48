"""The bench of tables on servers, in parts that can run alone.

jaxdist bench hybrid --part bytes --part links
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.core.harness import REPEATS
from benchmarks.core.report import Figure, Report
from jaxdist.errors import JaxdistError, RunError, did_you_mean
from jaxdist.models.recommend.rows import RowForm
from jaxdist.runtime.environment import python_module
from jaxdist.tables.bounded import BoundedStore
from jaxdist.tables.keys import KEY, servers_of
from jaxdist.tables.optimizer import RowAdagrad
from jaxdist.tables.store import RowStore

WIDTH = 16
OPTIMIZER = RowAdagrad(learning_rate=0.1)
ROWS = 50_000_000
"""The number of rows of a table, half of which one of two servers holds."""
BOUNDED_ROWS = 10_000_000
"""The largest number of rows of tables that grow, half of which one of two servers holds."""
PART = 100_000


def bench(repeats: int = REPEATS, part: Sequence[str] = ()) -> Report:
    """Run the named parts, or all.

    Args:
      repeats: timed pairs of lookups and of updates.
      part: the names of parts: bytes, store, bounded, worker, kills, links, ratings, clicks.

    Raises:
      JaxdistError: no part has this name, or a run fails.
    """
    parts: Mapping[str, Callable[[], list[Figure]]] = {
        "bytes": step_bytes,
        "store": lambda: store_figures(repeats),
        "bounded": lambda: bounded_figures(repeats),
        "worker": worker_figures,
        "kills": _kills,
        "links": _links,
        "ratings": lambda: _quality("RATINGS"),
        "clicks": lambda: _quality("CLICKS"),
    }
    if unknown := [name for name in part if name not in parts]:
        raise JaxdistError(
            f"bench hybrid has no part {unknown[0]!r}: {did_you_mean(unknown[0], parts)}"
        )
    return Report("hybrid", [one for name in part or parts for one in parts[name]()])


# These modules are imported in functions, so that the list of all benches does not need the extra
# param-server.
def _kills() -> list[Figure]:
    from benchmarks.param_server.tables import figures

    return figures()


def _links() -> list[Figure]:
    from benchmarks.param_server.links import figures

    return figures()


def _quality(task: str) -> list[Figure]:
    from benchmarks.hybrid import quality

    return quality.figures(getattr(quality, task))


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
    store = RowStore(RowForm({"id": ROWS}, WIDTH, 0.1), OPTIMIZER, 0, servers=2)
    draws, count = np.random.default_rng(0), ROWS // 2
    order = draws.permutation(count)[: int(0.9 * count)].astype(np.uint32) * 2
    note = f"{len(order)} of {count} rows touched in random order, {WIDTH} wide with Adagrad"
    return _of_store("", store, order, store.columns * 4, note, repeats)


def bounded_figures(repeats: int, most: int = BOUNDED_ROWS) -> list[Figure]:
    """Measure a server that holds half of the rows of tables with 64-bit ids, and is 4/5 full.

    Args:
      most: the largest number of rows of both servers.
    """
    form = RowForm({"id": 0}, WIDTH, 0.1, most=most)
    store = BoundedStore(form, OPTIMIZER, 0, servers=2)
    draws = np.random.default_rng(0)
    order = np.zeros(int(0.8 * most), KEY)
    order["id"] = draws.integers(2**63, size=len(order), dtype=np.uint64)
    order = order[servers_of(order, 2, most) == 0]
    note = f"{len(order)} ids of 64 bits in room for {most // 2}, {WIDTH} wide with Adagrad"
    # A row has its values, its optimizer state, the number of its last update, and its key.
    return _of_store("bounded ", store, order, store.columns * 4 + KEY.itemsize, note, repeats)


def _of_store(
    what: str, store: RowStore, order: np.ndarray, row_bytes: int, note: str, repeats: int
) -> list[Figure]:
    """Update rows of a store in order, and measure its memory, lookups and updates."""
    grads = np.ones((PART, WIDTH), np.float32)
    before, draws = _resident(), np.random.default_rng(1)
    for at in range(0, len(order), PART):
        part = order[at : at + PART]
        store.update(part, grads[: len(part)], 0.1)
    memory, rows = _resident() - before, store.touched * row_bytes
    asked = draws.choice(order, PART, replace=False)
    places = draws.permutation(store.touched)[:PART]
    table = store.kept()[1]

    def plain() -> None:
        found = table[places]
        OPTIMIZER.update(found[:, : WIDTH + 1], grads, 0.1)
        table[places] = found

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "lookups": (lambda: store.read(asked), lambda: table[places, :WIDTH]),
        "updates": (lambda: store.update(asked, grads, 0.1), plain),
    }
    return [
        Figure(f"memory of a {what}server", memory / 2**20, rows / 2**20, "<= 1.15", "MiB", note),
        *(_rate(f"{what}{name}", *pair, repeats) for name, pair in pairs.items()),
    ]


def worker_figures() -> list[Figure]:
    """Measure the largest memory of the processes of a run with a table of 50 million rows."""
    fields = 8
    config = {
        "model": {"type": "dlrm", "width": WIDTH, "bottom": [16], "top": [16]},
        "data": {"type": "clicks", "fields": fields, "ids": ROWS // fields, "examples": 4096},
        "optim": {"type": "sgd", "momentum": 0.0, "learning_rate": 0.1},
        "train": {"steps": 20, "batch_size": 256},
        "strategy": {"type": "hybrid", "servers": 2},
    }
    with tempfile.TemporaryDirectory(prefix="jaxdist-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps({**config, "run": {"directory": f"{folder}/run"}}))
        command = python_module("jaxdist.cli", "train", str(path))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"the run with {ROWS:,} rows failed: {done.stderr[-500:]}")
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    note = f"{ROWS:,} rows x {WIDTH} on two servers, 20 steps of 256 examples; the largest process "
    note += "of the run or of an earlier part; the reference is 1 GB"
    return [Figure("memory of a worker", largest / 1024, 1e9 / 2**20, "<= 1", "MiB", note)]


def _rate(
    name: str, ours: Callable[[], object], other: Callable[[], object], repeats: int
) -> Figure:
    """Compare the rates, in CPU seconds, of two functions of the same rows that run in turn."""
    seconds: list[list[float]] = [[], []]
    for _ in range(repeats):
        for function, into in zip((ours, other), seconds, strict=True):
            begun = time.process_time()
            function()
            into.append(time.process_time() - begun)
    ours_rate, other_rate = (PART / sorted(one)[len(one) // 2] / 1e6 for one in seconds)
    note = f"{PART} rows; the reference is numpy's fancy indexing; CPU seconds, in turns"
    return Figure(f"{name} of a server core", ours_rate, other_rate, ">= 0.5", "M rows/s", note)
