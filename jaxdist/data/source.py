"""The contract of a data source: random access to examples by index."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jax.typing import ArrayLike

from jaxdist.config.importing import describe_exception
from jaxdist.data.text.tokenizer import Tokenizer
from jaxdist.data.values import Allowed
from jaxdist.errors import DataError

Example = Mapping[str, np.ndarray]
HostBatch = dict[str, np.ndarray]


class Source(Protocol):
    """A split of a data set; `source[i]` always returns the same example."""

    def __len__(self) -> int:
        """Return the number of examples of the split."""
        ...

    def __getitem__(self, index: int) -> Example:
        """Return example `index`: arrays by name, with shapes that do not depend on `index`."""
        ...


@runtime_checkable
class BatchSource(Source, Protocol):
    """A source that returns many examples at once in less time than one by one."""

    def take(self, indices: np.ndarray) -> Example:
        """Return the examples `indices` (int64 [N]) with a leading dim N."""
        ...

    def __getitem__(self, index: int) -> Example:
        return take_one(self, index)


@runtime_checkable
class RandomSource(BatchSource, Protocol):
    """A source whose examples are changed at random each time that they are read for training."""

    def draw(self, indices: np.ndarray, keys: np.ndarray) -> Example:
        """Return the examples `indices` (int64 [N]), each changed at random by its key.

        Args:
          keys: the keys, uint64 [N]. A key depends on the seed and on the position of the example
            in the order of training.
        """
        ...


@dataclass(frozen=True)
class Dataset:
    """The result of every data configuration.

    Attributes:
      train: the examples to train on.
      heldout: the examples to evaluate on, or None if no examples are held out.
      vocab_size: the number V such that `tokens` and `targets` are in 0 to V - 1, or None without
        tokens.
      classes: the number C such that `label` is in 0 to C - 1, or None without labels.
      description: a line that describes the data to the user.
      tokenizer: the mapping between text and tokens, or None for data without text.
      fields: the number of ids of each categorical field, by name, in the order of the columns of
        `ids`, or None without such fields. With 0, ids have 64 bits, and `ids` has their two 32-bit
        words as a last dim.
      baselines: a function that returns, by name, the losses of simple models on the held-out
        split, in nats per token. The function may take seconds, so it is called only if a result is
        compared with these losses.
      unchecked: the names of fields that may hold NaN, infinity, or values out of range.
    """

    train: Source
    heldout: Source | None = None
    vocab_size: int | None = None
    classes: int | None = None
    description: str = ""
    tokenizer: Tokenizer | None = None
    fields: Mapping[str, int] | None = None
    baselines: Callable[[], Mapping[str, float]] = field(default=dict)
    unchecked: frozenset[str] = frozenset()

    def with_sources(self, change: Callable[[Source], Source], **more: Any) -> Dataset:
        """Return the data set with `change` applied to both splits, and other fields replaced."""
        heldout = None if self.heldout is None else change(self.heldout)
        return replace(self, train=change(self.train), heldout=heldout, **more)

    @property
    def allowed(self) -> Allowed:
        """The allowed values of the data set's examples."""
        size = self.vocab_size
        limits = {"tokens": size, "targets": size, "label": self.classes}
        declared = {name: limit for name, limit in limits.items() if limit is not None}
        return Allowed(declared, self.unchecked, self.fields or {})


class ArraySource(BatchSource):
    """A source of examples that are rows of arrays in memory, or in a memory map."""

    def __init__(self, **arrays: np.ndarray):
        """Store the arrays, whose first dim counts the examples."""
        assert len({len(array) for array in arrays.values()}) == 1, "one length for all arrays"
        self._arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def take(self, indices: np.ndarray) -> Example:
        return {name: array[indices] for name, array in self._arrays.items()}


def length(source: Source, what: str) -> int:
    """Return the number of examples of a source.

    Args:
      what: the name of the source in error messages.

    Raises:
      DataError: `__len__` raised an error, or returned no valid length, or returned 0.
    """
    try:
        examples = len(source)
    except Exception as error:
        raise DataError(
            f"data: __len__ of {what} raised {describe_exception(error)}: __len__ must return the "
            "number of examples"
        ) from error
    if examples == 0:
        raise DataError(f"data: {what} is empty: it has 0 examples")
    return examples


def take(source: Source, indices: np.ndarray) -> HostBatch:
    """Read the examples `indices` (int64 [N]) of any source, with a leading dim N.

    Raises:
      DataError: an example cannot be read, is not a mapping of arrays, or differs in keys, shape
        or dtype from example 0.
    """
    if isinstance(source, BatchSource):
        return narrowed(source.take(indices))
    first = read_example(source, 0)
    rows = [read_example(source, int(index)) for index in indices]
    for index, row in zip(indices, rows, strict=True):
        _check_alike(first, row, int(index))
    return {
        name: np.stack([row[name] for row in rows])
        if rows
        else np.empty((0, *value.shape), value.dtype)
        for name, value in first.items()
    }


def narrowed(batch: Example) -> HostBatch:
    """Return a batch in which each array is converted by `narrow`."""
    return {name: narrow(name, values) for name, values in batch.items()}


def take_one(source: BatchSource, index: int) -> Example:
    """Read example `index` of a source that reads whole batches.

    Raises:
      IndexError: there is no such example.
    """
    if not 0 <= index < len(source):
        raise IndexError(f"example {index} of {len(source)}")
    return {name: rows[0] for name, rows in source.take(np.array([index])).items()}


def read_example(source: Source, index: int) -> HostBatch:
    """Read example `index` of any source, as arrays with the dtypes to which jax converts them.

    Raises:
      DataError: the source raised an error, or the example is not a mapping of names to arrays.
    """
    try:
        example: object = source[index]
    except Exception as error:
        raise DataError(f"data: example {index} raised {describe_exception(error)}") from error
    if not isinstance(example, Mapping) or not example:
        raise DataError(
            f"data: example {index} is a {type(example).__name__}, expected a mapping of names to "
            "arrays, as in {'image': image, 'label': label}"
        )
    return {str(name): narrow(f"{name}[{index}]", value) for name, value in example.items()}


def narrow(name: str, value: ArrayLike) -> np.ndarray:
    """Convert `value` to an array of at most 32 bits per element, as jax does.

    Unlike jax, the function refuses integers that do not fit in 32 bits.

    Args:
      name: the name of the value, for errors.

    Raises:
      DataError: `value` does not hold numbers, or holds integers that do not fit in 32 bits.
    """
    array = np.asarray(value)
    if array.dtype == np.float64:
        # A value beyond the range becomes infinity, which `Allowed` refuses.
        with np.errstate(over="ignore"):
            return array.astype(np.float32)
    if array.dtype in (np.int64, np.uint64):
        limits = np.iinfo(np.int32)
        if array.size and (array.max() > limits.max or array.min() < limits.min):
            raise DataError(
                f"data: {name} holds {array.min()} to {array.max()}, which 32 bits cannot hold: "
                "number the values from 0"
            )
        return array.astype(np.int32)
    if array.dtype.kind in "OUSMm":
        raise DataError(f"data: {name} has dtype {array.dtype}, expected numbers")
    return array


def _check_alike(first: HostBatch, row: HostBatch, index: int) -> None:
    if row.keys() != first.keys():
        raise DataError(
            f"data: example {index} has the keys {sorted(row)}, but example 0 has "
            f"{sorted(first)}; every example needs the same keys"
        )
    for name, value in row.items():
        if (value.shape, value.dtype) != (first[name].shape, first[name].dtype):
            raise DataError(
                f"data: {name!r} of example {index} is {value.dtype} {value.shape}, but in "
                f"example 0 it is {first[name].dtype} {first[name].shape}; pad or crop examples "
                "to one shape"
            )
