"""The allowed values of a batch: integers in a declared range, or else finite numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxdist.errors import DataError


@dataclass(frozen=True)
class Allowed:
    """The allowed values of the fields of an example.

    Values are checked on the host, since a gather on a device clamps an index that is out of range,
    without an error.

    Attributes:
      limits: for each field of integers, the limit L such that its values are in 0 to L - 1.
      unchecked: the fields that may hold any values.
      tables: the number of ids of each column of the field `ids`, by the column's name, or 0 for
        ids of 64 bits.
    """

    limits: Mapping[str, int] = field(default_factory=dict)
    unchecked: frozenset[str] = frozenset()
    tables: Mapping[str, int] = field(default_factory=dict)

    def check(
        self, batch: Mapping[str, np.ndarray], examples: np.ndarray, split: str = "training split"
    ) -> None:
        """Refuse a batch with a value that is not allowed.

        Args:
          batch: the arrays [N, ...] by field.
          examples: the indices of the examples in their split, int64 [N].
          split: the name of the split in error messages.

        Raises:
          DataError: a value is not allowed; the message names the first such value.

        >>> allowed = Allowed({"label": 10})
        >>> allowed.check({"label": np.array([3, 12])}, np.array([7, 41]))
        Traceback (most recent call last):
          ...
        jaxdist.errors.DataError: data: 'label' of example 41 of the training split is 12, \
expected a whole number from 0 to 9: correct the data, or the range that it declares; for imported \
data, data.unchecked: [label] turns this check off
        """
        if self.tables:
            self._check_ids(batch["ids"], examples, split)
        for name, values in batch.items():
            limit = self.limits.get(name)
            wrong = None if name in self.unchecked else _wrong(values, limit)
            if wrong is None or not wrong.any():
                continue
            first = tuple(np.argwhere(wrong)[0].tolist())
            place = list(first[1:]) or ""
            expected = (
                "a finite number" if limit is None else f"a whole number from 0 to {limit - 1}"
            )
            declared = "" if limit is None else ", or the range that it declares"
            raise DataError(
                f"data: {name!r}{place} of example {examples[first[0]]} of the {split} is "
                f"{values[first]}, expected {expected}: correct the data{declared}; for imported "
                f"data, data.unchecked: [{name}] turns this check off"
            )

    def _check_ids(self, ids: np.ndarray, examples: np.ndarray, split: str) -> None:
        """Refuse ids without a row in their column's table; the error names the first such id."""
        sizes = np.array([*self.tables.values()])[None, :]
        if ids.ndim == 3:
            # Ids of 64 bits are stored as two words. A table of size 0 accepts every 64-bit id.
            ids, sizes = np.ascontiguousarray(ids).view(np.uint64)[..., 0], sizes.astype(np.uint64)
        wrong = (sizes > 0) & ((ids < 0) | (ids >= sizes))
        if not wrong.any():
            return
        row, column = np.argwhere(wrong)[0].tolist()
        name, limit = [*self.tables.items()][column]
        raise DataError(
            f"data: 'ids'[{column}] of example {examples[row]} of the {split} is "
            f"{ids[row, column]}, and the table of {name!r} has rows 0 to {limit - 1}: correct the "
            "data, declare a larger table, or hash ids to its size (data.hash_size)"
        )


def _wrong(values: np.ndarray, limit: int | None) -> np.ndarray | None:
    """Return a bool array that is true for each forbidden value, or None if all are allowed."""
    whole = values.dtype.kind in "biu"
    if limit is None:
        return None if whole else ~np.isfinite(values)
    outside = (values < 0) | (values >= limit)
    # NaN is neither below 0 nor above the limit, but it differs from its floor.
    return outside if whole else outside | (values != np.floor(values))
