"""Held-out errors of recommenders whose rows are on servers, by consistency model.

The data are MovieLens-100K. Each of two devices is a worker with a client of its own, like a
training process, and each step averages the gradients of the dense parameters over the devices. The
servers are in this process. Servers and clients are the same classes as in a run, and a local wire
carries their frames.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.core.report import Figure
from benchmarks.param_server.local_wire import LocalWire
from benchmarks.param_server.serving import served
from jaxdist.experiment import build, load
from jaxdist.experiment.config import Source
from jaxdist.param_server.consistency.arrival import SSP, Asynchronous
from jaxdist.param_server.consistency.contract import Consistency
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.tables.batch import TableRows, Touched
from jaxdist.tables.bounded import open_store
from jaxdist.tables.client import TableClient
from jaxdist.tables.messages import spec_of_reply
from jaxdist.tables.server import TableServer, TableShard
from jaxdist.tables.training.program import LookAheadLoader, TableProgram
from jaxdist.train.evaluate import evaluate
from jaxdist.train.strategy.config import Hybrid

WORKERS, SERVERS, SEEDS = 2, 2, 3
LATE: dict[str, Any] = {"reads": "ahead", "gradient_weight": "whole"}
MODELS: Mapping[str, Consistency] = {
    "BSP": BSP(),
    "SSP 2": SSP(bound=2, **LATE),
    "async": Asynchronous(**LATE),
}
"""The consistency models. Without BSP, workers pull the rows of a batch before they push the
gradients of the previous batch, so that all rows are stale."""
MOST_APART = 0.003


@dataclass(frozen=True)
class Task:
    """A recommender, and the value that it has to reach.

    Attributes:
      metric: the name of the held-out value.
      config: the name of the shipped config.
      settings: the settings that override the config, except its seed.
      folds: the number of held-out parts, each of which has its own runs.
      goal: the value to reach, which published results report for the same division of the data.
      sign: the comparison with the goal.
    """

    metric: str
    config: str
    settings: Sequence[str]
    folds: int
    goal: float
    sign: str


RATINGS = Task(
    metric="rmse",
    config="movielens",
    settings=(
        "strategy={type: hybrid, servers: 2, optimizer: {type: adagrad, per: element}}",
        "train.epochs=4", "train.batch_size=1024", "optim.learning_rate=0.08",
    ),
    folds=5,
    goal=0.934,
    sign="<= 1",
)  # fmt: skip
CLICKS = Task(
    metric="auc",
    config="movielens_clicks",
    settings=(
        "strategy={type: hybrid, servers: 2, optimizer: {type: lazy_adam}}",
        "train.batch_size=1024", "optim.learning_rate=3e-3", "model.penalty=0.12",
    ),
    folds=1,
    goal=0.7765,
    sign=">= 1",
)  # fmt: skip


def figures(task: Task) -> list[Figure]:
    """Compare the held-out value of a task with its goal, and consistency models with BSP."""
    path = Path(__file__).parents[2] / "configs" / "recommend" / f"{task.config}.yaml"
    found: dict[str, list[float]] = {name: [] for name in MODELS}
    for fold in range(task.folds):
        for seed in range(SEEDS):
            given = [*task.settings, f"data.fold={fold}", f"seed={seed}"]
            for name, values in trained(path, given, MODELS).items():
                found[name].append(values[task.metric])
    name = f"held-out {task.metric.upper()}"
    bsp, *others = ((model, statistics.fmean(values)) for model, values in found.items())
    note = f"MovieLens-100K, the mean of {len(found['BSP'])} runs ({task.folds} held-out parts, "
    note += f"{SEEDS} seeds): {WORKERS} workers and {SERVERS} servers in one process"
    apart = f"the difference from BSP, beside {MOST_APART}; rows are pulled one step ahead"
    return [
        Figure(f"{name}, BSP", bsp[1], task.goal, task.sign, "", note),
        *(
            Figure(f"{name}, {model} beside BSP", abs(value - bsp[1]), MOST_APART, "<= 1", "",
                   f"{value:.4f}; {apart}")
            for model, value in others
        ),
    ]  # fmt: skip


@dataclass
class WorkerRows(TableRows):
    """The rows of a batch, of which each device pulls its own."""

    ends: list[int] = field(default_factory=list)

    def touched(self, ids_BF: jax.Array) -> Touched:
        """Return the rows of all devices, one after another; several devices may have a row."""
        found = super().touched(ids_BF)
        each = [found.rows[at] for at in found.blocks.values()]
        self.ends = [int(end) for end in np.cumsum([len(rows) for rows in each])]
        every = np.split(np.arange(self.ends[-1]), self.ends[:-1])
        blocks = dict(zip(found.blocks, every, strict=True))
        return Touched(np.concatenate(each), blocks, found.places, found.looked_up)


@dataclass
class Workers:
    """The clients of all workers, which replace the client of a single process.

    Attributes:
      ahead: whether the rows of the next batch are pulled in this step.
    """

    rows: WorkerRows
    clients: Sequence[TableClient] = ()
    ahead: bool = False
    sent_bytes = received_bytes = 0

    def __post_init__(self) -> None:
        self._cuts: deque[list[int]] = deque()

    def begin(self, rows: np.ndarray) -> None:
        self._cuts.append(self.rows.ends[:-1])
        for client, mine in zip(self.clients, np.split(rows, self._cuts[-1]), strict=True):
            client.begin(mine)

    def take(self) -> np.ndarray:
        return np.concatenate([client.take() for client in self.clients])

    def push(self, rows: np.ndarray, grads: np.ndarray, rate: float) -> None:
        cuts = self._cuts.popleft()
        parts = np.split(rows, cuts), np.split(grads, cuts)
        for client, mine, change in zip(self.clients, *parts, strict=True):
            client.push(mine, change, rate)


@contextmanager
def served_to(
    strategy: Hybrid, model: Consistency, rows: TableRows, most: int
) -> Iterator[list[TableClient]]:
    """Start the servers of a run in this process, and yield the client of each worker.

    Args:
      most: the largest number of rows in a message.
    """
    with ExitStack() as stack:
        wires = []
        for at in range(SERVERS):
            store = open_store(rows.form, strategy.optimizer, rows.seed, server=at, servers=SERVERS)
            shard: Any = TableShard(store, most)
            server = served(shard, model, WORKERS, kind=TableServer)
            stack.callback(server.close)
            wires.append(LocalWire(server, partial(spec_of_reply, spec=shard.layout.spec)))
        found = [TableClient(number, model, wires, rows.form.width) for number in range(WORKERS)]
        for one in found:
            stack.callback(one.close)
        yield found


def trained(
    source: Source, overrides: Sequence[str], models: Mapping[str, Consistency]
) -> dict[str, dict[str, float]]:
    """Train a recommender once with each consistency model, and return the held-out values.

    Args:
      source: a config, whose strategy is hybrid.
      overrides: the settings that override the config.
    """
    document, config = load(source, overrides)
    built = build(config, document, devices=jax.devices()[:WORKERS])
    strategy, rows, heldout = config.strategy, built.rows, built.heldout
    assert isinstance(strategy, Hybrid)
    assert rows is not None
    assert heldout is not None
    loader: Any = LookAheadLoader(built.loader)
    workers: Any = Workers(WorkerRows(rows.form, rows.layout, rows.seed))
    # All models share one program, so that it is compiled once.
    program = TableProgram(
        built.program, workers.rows, workers, strategy.optimizer.learning_rate, WORKERS,
        lambda: loader.following if workers.ahead else None,
    )  # fmt: skip
    most = WORKERS * prod(built.program.batch["ids"].shape)
    found = {}
    for name, model in models.items():
        with served_to(strategy, model, rows, most) as workers.clients:
            rows.fetch = workers.clients[0].pull
            state = built.program.init()
            with loader.batches() as batches:
                for left in reversed(range(built.total_steps)):
                    workers.ahead = model.ahead and left > 0
                    state, _ = program.train(state, next(batches))
            for client in workers.clients:
                client.drain()
            with heldout.evaluation_batches() as batches:
                found[name] = evaluate(built.program, state.params, state.buffers, batches)
    return found
