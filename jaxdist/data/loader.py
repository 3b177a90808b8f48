"""The loader of global batches, from any step, in an order that depends on a seed.

The content of a batch depends only on the source, the seed and the step, and not on the number of
processes or devices. Each process reads only the rows that its devices need.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from itertools import islice
from typing import NamedTuple

import jax
import numpy as np

from jaxdist.data.permutation import key_of, mix, permuted_examples
from jaxdist.data.placement import BatchPlacement, Shardings
from jaxdist.data.source import RandomSource, Source, length, narrowed, take
from jaxdist.data.values import Allowed
from jaxdist.errors import DataError
from jaxdist.runtime.hardware import host_memory_bytes

DeviceBatch = dict[str, jax.Array]

WEIGHT = "weight"
ANY_FINITE = Allowed()


class BatchRows(NamedTuple):
    """The rows of a global batch.

    Attributes:
      examples: the indices of the examples, int64 [B].
      weights: the weights of the rows, float32 [B], or None if no row is padding.
      keys: the keys by which a `RandomSource` changes examples, uint64 [B], or None in evaluation.
    """

    examples: np.ndarray
    weights: np.ndarray | None = None
    keys: np.ndarray | None = None


class Loader:
    """A loader of batches of a source as global arrays; only the step is needed to resume.

    A batch maps the source's names to arrays with the leading dim `batch_size`. Evaluation batches
    also have a `weight` (float32): 1 for an example, 0 for padding. Training batches have no
    padding and therefore no such weight; the compiled step then knows the sum of weights, and no
    device waits for the sums of other devices. If the examples of a source have a `weight`, all
    batches have these weights.

    Attributes:
      batch_shapes: the shape, dtype and sharding of each array of a training batch.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        sharding: Shardings,
        seed: int = 0,
        shuffle: bool = True,
        prefetch: int = 2,
        threads: int = 2,
        allowed: Allowed = ANY_FINITE,
        split: str = "training split",
    ):
        """Check the arguments, read example 0, and plan the layout of batches.

        Args:
          source: the source of the examples.
          batch_size: the number of examples in a global batch.
          sharding: the function from the name and the shape of an array to its sharding.
          seed: the seed of the order of the examples, any integer >= 0.
          shuffle: whether each epoch has a different random order; False keeps the source's order.
          prefetch: the number of batches that are loaded ahead, in addition to the batch in use.
          threads: the number of threads that load different batches at the same time.
          allowed: the allowed values, which are checked when a batch is read.
          split: the name of the source in error messages.

        Raises:
          DataError: the source is empty or has no length, the batch size is below 1, or example 0
            has values that are not allowed.
          ShardingError: the batch does not divide over devices.
        """
        length(source, "the source")
        if batch_size < 1:
            raise DataError(f"batch_size is {batch_size}: use 1 or more")
        self._source = source
        self._start_example = 0
        self._batch_size = batch_size
        self._seed, self._shuffle = seed, shuffle
        self._prefetch, self._threads = prefetch, threads
        self._allowed, self._split = allowed, split
        example = _example(source)
        allowed.check(example, np.zeros(1, np.int64), split)
        self._example, self._sharding = example, sharding
        self._rows, self._at_once = slice(None), False
        self._lay_out(batch_size)

    def _lay_out(self, rows: int) -> None:
        shapes = {name: values.shape[1:] for name, values in self._example.items()}
        self._placement = BatchPlacement({**shapes, WEIGHT: ()}, rows, self._sharding)
        self.batch_shapes = {
            name: self._placement.struct(name, values.dtype)
            for name, values in self._example.items()
        }

    def part(self, start: int, size: int) -> Loader:
        """Return a loader of only the rows from `start` up to `start + size` of every batch.

        The rows may, for example, be the share of a worker.

        Raises:
          ShardingError: the rows do not divide over the devices.
        """
        found = copy(self)
        found._rows = slice(start, start + size)
        found._lay_out(size)
        return found

    def resized(self, batch_size: int, *, start_example: int) -> Loader:
        """Return a loader of the same examples in batches of another size.

        Args:
          start_example: the number of examples that were used before step 0, in batches of any
            size.
        """
        found = copy(self)
        found._batch_size, found._start_example = batch_size, start_example
        found._lay_out(batch_size)
        return found

    def at_once(self) -> Loader:
        """Return a loader with a single evaluation batch, for losses that return a scalar."""
        found = copy(self)
        found._at_once = True
        return found

    def batch(self, step: int) -> DeviceBatch:
        """Return the training batch of `step`, read in the calling thread."""
        return self._load(self._training_rows(step))

    def _training_rows(self, step: int) -> BatchRows:
        # The keys are mixed twice, so that they are unrelated to the keys that order the examples.
        keys = mix(mix(self._positions(step).astype(np.uint64)) ^ key_of(self._seed))
        return BatchRows(self.indices(step), keys=keys)

    def _positions(self, step: int) -> np.ndarray:
        """Return the positions (int64) of the rows of a batch, counted over all epochs."""
        first = self._start_example + step * self._batch_size
        return (np.arange(self._batch_size, dtype=np.int64) + first)[self._rows]

    def indices(self, step: int) -> np.ndarray:
        """Return the indices (int64) of the examples in the training batch of `step`."""
        positions = self._positions(step)
        if self._shuffle:
            return permuted_examples(positions, length=len(self._source), seed=self._seed)
        return positions % len(self._source)

    def batches(self, start_step: int = 0) -> Batches:
        """Return an endless iterator over training batches, from the batch of `start_step` on.

        Raises:
          DataError: this machine's memory cannot hold the batches.
        """
        return self._stream(self._training_rows, start_step, sys.maxsize)

    def evaluation_batches(self, limit: int | None = None) -> Batches:
        """Return an iterator over batches of all examples in order; the last batch is padded.

        A loader from `at_once` has the same examples in a single batch, without padding.

        Args:
          limit: the largest number of batches, or None for all examples.
        """
        if self._at_once:
            total = len(self._source)
            rows = total if limit is None else min(total, limit * self._batch_size)
            whole = self.resized(rows, start_example=0)
            return whole._stream(whole._evaluation_rows, 0, 1)
        count = -(-len(self._source) // self._batch_size)
        return self._stream(self._evaluation_rows, 0, count if limit is None else min(limit, count))

    def _evaluation_rows(self, step: int) -> BatchRows:
        positions = np.arange(self._batch_size, dtype=np.int64) + step * self._batch_size
        weights = (positions < len(self._source)).astype(np.float32)
        # Padding repeats the last example, since other values might not be allowed.
        return BatchRows(np.minimum(positions, len(self._source) - 1), weights)

    def _stream(self, rows: Callable[[int], BatchRows], start: int, stop: int) -> Batches:
        self._check_size()
        return Batches(
            lambda step: self._load(rows(step)), start, stop, self._prefetch, self._threads
        )

    def _check_size(self) -> None:
        rows = len(self._placement.rows)
        one = sum(
            math.prod(struct.shape[1:]) * struct.dtype.itemsize
            for struct in self.batch_shapes.values()
        )
        count, memory = 1 + self._prefetch, host_memory_bytes()
        # Without this check, the operating system would kill the process without a message.
        needed = count * rows * one
        if needed > memory:
            raise DataError(
                f"data: {count} batches of {rows:,} examples of {one / 1000000.0:,.1f} MB need "
                f"{needed / 1e9:,.1f} GB, but this machine has "
                f"{memory / 1e9:,.1f} GB: lower train.batch_size or train.prefetch, or "
                "make the examples smaller"
            )

    def _load(self, rows: BatchRows) -> DeviceBatch:
        mine = self._placement.rows
        if rows.keys is not None and isinstance(self._source, RandomSource):
            local = narrowed(self._source.draw(rows.examples[mine], rows.keys[mine]))
        else:
            local = take(self._source, rows.examples[mine])
        self._allowed.check(local, rows.examples[mine], self._split)
        if rows.weights is not None:
            # The weights are multiplied, since the source may also have weights, and padding must
            # still count as 0.
            local[WEIGHT] = local.get(WEIGHT, np.float32(1)) * rows.weights[mine]
        return self._placement.place(local)


def _example(source: Source) -> dict[str, np.ndarray]:
    """Read example 0 as a batch with a single row."""
    example = take(source, np.zeros(1, np.int64))
    if WEIGHT in example and example[WEIGHT].shape != (1,):
        shape = example[WEIGHT].shape[1:]
        raise DataError(
            f"data: {WEIGHT!r} of example 0 has shape {shape}, expected one number: "
            "store a single weight in each example"
        )
    return example


class Batches(Iterator[DeviceBatch]):
    """An iterator over batches that threads load ahead; call `close` after use."""

    def __init__(
        self,
        load: Callable[[int], DeviceBatch],
        start: int,
        stop: int,
        prefetch: int,
        threads: int,
    ):
        """Start the threads, which load batches from `load(start)` on.

        Args:
          load: a function from a step to its batch.
          start: the first step.
          stop: the step after the last step.
          prefetch: the number of batches that are loaded ahead.
          threads: the largest number of threads that load batches.
        """
        self._load, self._steps = load, iter(range(start, stop))
        self._threads = ThreadPoolExecutor(max(1, min(threads, prefetch)))
        self._loading: deque[Future[DeviceBatch]] = deque()
        for _ in range(prefetch):
            self._begin_one()

    def _begin_one(self) -> None:
        for step in islice(self._steps, 1):
            self._loading.append(self._threads.submit(self._load, step))

    def __next__(self) -> DeviceBatch:
        self._begin_one()
        if not self._loading:
            raise StopIteration
        batch = self._loading[0].result()
        # A batch that failed stays first, so that every later call raises the same error.
        self._loading.popleft()
        return batch

    def close(self) -> None:
        """Stop the threads, after they have loaded their current batches."""
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
