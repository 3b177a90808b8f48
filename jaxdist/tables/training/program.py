"""The training of a model whose tables are on servers: one process's part of each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdist.models.recommend.tables import PULLED
from jaxdist.tables.batch import TableRows, Touched
from jaxdist.tables.bounded import open_store
from jaxdist.tables.client import TableClient
from jaxdist.tables.optimizer import RowOptimizer
from jaxdist.tables.store import RowStore
from jaxdist.tables.training.files import about_tables, read_tables
from jaxdist.train.state import TrainState
from jaxdist.train.step import Program

TableBatch = Mapping[str, jax.Array]


class LookAheadLoader:
    """A loader that also provides the batch after the current batch.

    Attributes:
      following: the batch after the newest yielded batch, or None after the last batch.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.following: TableBatch | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    @contextmanager
    def batches(self, start: int = 0) -> Iterator[Iterator[TableBatch]]:
        """Return a context with an iterator over batches, as `Loader.batches` does."""
        with self._loader.batches(start) as batches:
            yield self._looking(batches)

    def _looking(self, batches: Iterator[TableBatch]) -> Iterator[TableBatch]:
        now = next(batches, None)
        while now is not None:
            self.following = next(batches, None)
            yield now
            now = self.following


@dataclass(frozen=True)
class TableProgram:
    """A program whose train step pulls the rows of its batch and pushes their gradients.

    Attributes:
      rate: the constant learning rate of rows, or None to use the learning rate of each step.
      processes: the number of processes that push.
      next_batch: a function that returns the batch after the current batch, or None if the rows of
        the next batch are not pulled while the current step is computed.
      counts: the numbers of ids, of unique rows and of bytes of payloads in training so far.
    """

    program: Program
    rows: TableRows
    client: TableClient
    rate: float | None
    processes: int
    next_batch: Callable[[], TableBatch | None] = lambda: None
    counts: Counter[str] = field(default_factory=Counter)
    _begun: list[Touched] = field(default_factory=list)

    @cached_property
    def _step(self) -> Any:
        return self.program.train_with(PULLED)

    @cached_property
    def _rate_at(self) -> int:
        return self.program.metrics.index("learning_rate")

    def _begin(self, batch: TableBatch) -> None:
        self._begun.append(self.rows.touched(batch["ids"]))
        self.client.begin(self._begun[-1].rows)

    def _filled(self, batch: TableBatch) -> tuple[TableBatch, Touched]:
        """Return a batch with the values of its table rows; begin to pull the next batch's rows."""
        if not self._begun:
            self._begin(batch)
        touched = self._begun.pop()
        given = self.rows.placed(batch, touched, self.client.take())
        following = self.next_batch()
        if following is not None:
            self._begin(following)
        return given, touched

    def train(self, state: TrainState, batch: TableBatch) -> tuple[TrainState, jax.Array]:
        """Take a step, and return its state and metrics while its pushes may still be pending."""
        client, counts = self.client, self.counts
        before = client.sent_bytes + client.received_bytes
        given, touched = self._filled(batch)
        state, values, grads = self._step(state, given)
        examples, fields = given["ids"].sharding.shard_shape(given["ids"].shape)
        found = touched.gathered(grads, examples * fields, examples)
        # The gradient of the batch's mean loss is the sum of the gradients from all processes, but
        # a server computes the mean over processes.
        if self.processes > 1:
            found *= np.float32(self.processes)
        rate = self.rate or float(np.asarray(values)[self._rate_at])
        client.push(touched.rows, found, rate)
        more = client.sent_bytes + client.received_bytes - before
        counts.update(ids=touched.looked_up, unique_ids=len(touched.rows), bytes=more)
        return state, values


def saved_rows(run: Path, step: int, rows: TableRows, optimizer: RowOptimizer) -> RowStore:
    """Return the tables that were saved at a step, read by this process alone.

    Raises:
      CheckpointError: the tables of the step are missing or damaged, or do not match the config.
    """
    store = open_store(rows.form, optimizer, rows.seed)
    for found, values in read_tables(run, step, about_tables(rows, optimizer)):
        store.load(found, values)
    return store
