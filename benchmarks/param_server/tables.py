"""Table servers in processes that are killed, and clients that push integers to them."""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any

import numpy as np

from benchmarks.core.report import Figure
from jaxdist.checkpoint.identity import Identity, new_id, write_identity
from jaxdist.errors import RunError
from jaxdist.models.recommend.rows import RowForm
from jaxdist.param_server import processes
from jaxdist.param_server.consistency.arrival import Asynchronous
from jaxdist.tables.batch import TableRows
from jaxdist.tables.client import TableClient
from jaxdist.tables.optimizer import RowSgd
from jaxdist.tables.training.files import about_tables
from jaxdist.tables.training.servers import Wires, start_team
from jaxdist.tables.training.team import TableTeam
from jaxdist.train.strategy.config import Hybrid
from jaxdist.wire.ports import Place

FORM = RowForm({"user": 300, "item": 200}, 4, 0.0)
MOST = 512
WAIT_SECONDS = 120.0
GOAL_SECONDS = 3.0


@contextmanager
def table_servers(
    clients: int = 1, servers: int = 2, *, run: Path | None = None, **settings: Any
) -> Iterator[tuple[TableTeam, list[TableClient]]]:
    """Start table servers whose rows begin at zero, with plain SGD at rate 1, and clients.

    Args:
      run: an empty run directory, or None to create a directory.
      settings: further settings of the strategy.
    """
    whole = Asynchronous(gradient_weight="whole")
    given = {"optimizer": RowSgd(learning_rate=1.0), "consistency": whole, **settings}
    strategy = Hybrid(servers=servers, **given)
    with ExitStack() as stack:
        if run is None:
            run = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxdist-")))
        identity = Identity(new_id(), run)
        write_identity(run, identity)
        layout: Any = None
        setup = {
            "run": {"id": identity.id, "path": str(run)},
            "about": about_tables(TableRows(FORM, layout), strategy.optimizer),
            "step": 0,
            "clients": clients,
            "most_rows": MOST,
        }
        team, token = start_team(strategy, setup, stack, processes.__name__, lambda line: None)
        wires = Wires(strategy, token, FORM.width, MOST)
        found = [wires.client(team.leaders, number) for number in range(clients)]
        for one in found:
            stack.callback(one.close)

        def moved(server: int, port: Place, epoch: int) -> None:
            for one in found:
                one.move(server, wires.to(server, port), epoch)

        def failed(reason: str) -> None:
            for one in found:
                one.fail(reason)

        team.follow(failed, moved)
        yield team, found


@dataclass
class Pusher:
    """A thread that pulls rows and pushes integers, and adds up what servers have acknowledged."""

    client: TableClient
    sums: np.ndarray = field(default_factory=lambda: np.zeros((FORM.rows, FORM.width), np.float32))
    last: float = 0.0
    over: bool = False

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self.over = True
        self._thread.join(WAIT_SECONDS)

    def _run(self) -> None:
        draws = np.random.default_rng(self.client.number)
        while not self.over:
            begun = time.monotonic()
            rows = np.sort(draws.choice(FORM.rows, 40, replace=False)).astype(np.uint32)
            grads = draws.integers(-8, 9, (40, FORM.width)).astype(np.float32)
            self.client.pull(rows)
            self.client.push(rows, grads, 1.0)
            self.client.drain()
            self.sums[rows] += grads
            self.last = begun


def killed(
    kills: int,
    clients: int = 2,
    servers: int = 3,
    takeover_seconds: float = 5.0,
    signals: Sequence[Signals] = (SIGKILL,),
) -> tuple[list[np.ndarray], list[float]]:
    """Kill table servers at random moments; the first is only stopped, and the run must kill it.

    Args:
      signals: the signals in turn; SIGTERM asks a server to leave.

    Returns:
      The sum that servers have applied, the sum that they have acknowledged, and for each kill the
      seconds until each client had an acknowledgement for a push that it began afterwards.

    Raises:
      RunError: pushes stop, or the rows are lost.
    """
    rng, seconds = random.Random(kills), list[float]()
    settings: Any = {"replicas": 2, "takeover_seconds": takeover_seconds}
    with table_servers(clients, servers, **settings) as (team, found):
        pushers = [Pusher(one) for one in found]
        for kill in range(kills):
            _until(lambda: team.safe)
            time.sleep(rng.random() / 4)
            begun = time.monotonic()
            victim = team.servers[rng.choice(sorted(team.servers))]
            os.kill(victim.process.pid, signals[kill % len(signals)] if kill else SIGSTOP)
            _until(lambda begun=begun: all(one.last > begun for one in pushers))
            if kill:  # a stopped server is detected only after the time for a takeover
                seconds.append(time.monotonic() - begun)
            _until(lambda victim=victim: victim not in team.servers.values())
        for one in pushers:
            one.close()
        _until(lambda: team.safe)
        applied = found[0].pull(np.arange(FORM.rows, dtype=np.uint32))
    return [0 - applied, sum((one.sums for one in pushers[1:]), start=pushers[0].sums)], seconds


def _until(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RunError(f"pushes or followers do not come back within {WAIT_SECONDS:g} s")
        time.sleep(0.001)


def figures(kills: int = 50) -> list[Figure]:
    """Measure how long pushes of rows stall when a table server is killed."""
    sums, seconds = killed(kills)
    difference = float(np.abs(sums[0] - sums[1]).max())
    worst = sorted(seconds)[-max(1, len(seconds) // 20)]
    note = f"{kills} SIGKILLs of table servers, of which each leads and follows; {difference:g} is "
    note += "the largest difference between the sums acknowledged and applied"
    return [Figure("longest stall of rows after a kill (p95)", worst, GOAL_SECONDS, "<= 1",
                   note=note)]  # fmt: skip
