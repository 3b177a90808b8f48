"""Click logs in Criteo's format: in a line, tabs separate a label, 13 counts and 26 hex ids."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from jaxdist.config.schema import Config, Count
from jaxdist.data.recommend.rows import hashed, numbered_lines, parsed, read_file
from jaxdist.data.source import ArraySource, Dataset
from jaxdist.errors import DataError

COUNTS, IDS = 13, 26
COLUMNS = 1 + COUNTS + IDS


class CriteoConfig(Config):
    """Click logs in the format of Criteo's display advertising data, without a header line.

    A count c becomes log(1 + max(c, 0)), and an empty count becomes 0. An id is hashed to a number
    below `hash_size`, or kept; an empty id becomes 0.
    """

    type: Literal["criteo"]
    """The name that selects Criteo's click logs in a config."""
    train: str
    """The path of the file of training examples, with an example in each line."""
    heldout: str | None = None
    """The path of the file of held-out examples; null evaluates nothing."""
    hash_size: Count | None = 100_000
    """The number of rows of each of the 26 tables. Ids are hashed to a row, so a smaller number
    saves memory and makes more ids share a row. null keeps ids of 64 bits, for which
    strategy.most_rows bounds the number of rows."""

    def build(self) -> Dataset:
        """Read all lines into memory.

        Raises:
          DataError: a file cannot be read, or a line is incomplete or not an example; the message
            has the number of the line.
        """
        given = {"train": self.train, "heldout": self.heldout}
        train, heldout = (
            None if name is None else read_clicks(Path(name).expanduser(), key, self.hash_size)
            for key, name in given.items()
        )
        assert train is not None
        examples = [len(split) for split in (train, heldout) if split is not None]
        return Dataset(
            train=train,
            heldout=heldout,
            fields={f"C{at + 1}": self.hash_size or 0 for at in range(IDS)},
            description=f"Criteo: {' + '.join(f'{n:,}' for n in examples)} clicks and views",
        )


def read_clicks(path: Path, key: str, hash_size: int | None) -> ArraySource:
    """Read a file as `ids` int32 [26], `dense` float32 [13] and `target` float32 of each example.

    Args:
      key: the key of the file in the config, for errors.
      hash_size: the number of rows of each table. None keeps the ids, as their two 32-bit words,
        int32 [26, 2].

    Raises:
      DataError: see `CriteoConfig.build`.
    """
    labels: list[float] = []
    counts: list[list[float]] = []
    ids: list[list[int]] = []
    for number, values in numbered_lines(read_file(path, f"data.{key}"), str(path)):
        if len(values) != COLUMNS:
            raise DataError(
                f"data: {path}, line {number} has {len(values)} values, expected {COLUMNS} "
                f"between tabs: a label, {COUNTS} counts and {IDS} ids; correct the line"
            )
        if values[0] not in ("0", "1"):
            raise DataError(
                f"data: {path}, line {number}: the label is {values[0][:40]!r}, expected 0 or "
                "1: correct the line"
            )
        labels.append(float(values[0]))
        counts.append(
            [
                parsed(float, text or "0", f"count {at + 1}", str(path), number)
                for at, text in enumerate(values[1 : 1 + COUNTS])
            ]
        )
        # An id has at most 64 bits; 0 marks an empty id.
        ids.append(
            [
                parsed(_hexadecimal, text, f"id {at + 1}", str(path), number)
                for at, text in enumerate(values[1 + COUNTS :])
            ]
        )
    keys = np.array(ids, np.uint64)
    if hash_size is None:
        found = keys.view(np.int32).reshape(len(keys), IDS, 2)
    else:
        rows = np.stack([hashed(keys[:, at], hash_size, at) for at in range(IDS)], 1)
        found = np.where(keys == 0, 0, rows).astype(np.int32)
    dense = np.log1p(np.maximum(np.array(counts, np.float32), 0))
    return ArraySource(ids=found, dense=dense, target=np.array(labels, np.float32))


def _hexadecimal(text: str) -> int:
    value = int(text, 16) if text else 0
    if not 0 <= value < 2**64:
        raise ValueError(text)
    return value
