"""The reader of columns of values from text files; its errors name the file and the line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from jaxdist.data.permutation import mix
from jaxdist.errors import DataError, did_you_mean, os_errors_as

Value = TypeVar("Value")


def numbered_lines(text: bytes, where: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the values of each line that is not empty; tabs separate the values.

    Raises:
      DataError: a line is not UTF-8, or the last line has no line break, as in an incomplete file.
    """
    if text and not text.endswith(b"\n"):
        number = text.count(b"\n") + 1
        raise DataError(
            f"data: {where}, line {number} does not end with a line break, so the file may be "
            "truncated: fetch or write the file again"
        )
    for number, line in enumerate(text.split(b"\n"), 1):
        if line:
            try:
                yield number, line.rstrip(b"\r").decode().split("\t")
            except UnicodeDecodeError as error:
                raise DataError(f"data: {where}, line {number} is not UTF-8: {error}") from error


def table_of(
    text: bytes, where: str, columns: Sequence[str]
) -> tuple[list[int], dict[str, list[str]]]:
    """Read columns of a table whose first line names each column as `name:type`.

    Args:
      where: the name of the file in error messages.
      columns: the names of the columns to read.

    Returns:
      The number of each line, and the texts of each column.

    Raises:
      DataError: a column is missing, or a line has more or fewer values than the first line.
    """
    rows = numbered_lines(text, where)
    _, head = next(rows, (1, [""]))
    names = [name.split(":")[0] for name in head]
    for column in columns:
        if column not in names:
            raise DataError(
                f"data: {where}, line 1 names no column {column!r}: {did_you_mean(column, names)}"
            )
    places = [names.index(column) for column in columns]
    numbers: list[int] = []
    found: dict[str, list[str]] = {column: [] for column in columns}
    for number, values in rows:
        if len(values) != len(names):
            raise DataError(
                f"data: {where}, line {number} has {len(values)} values, but line 1 names "
                f"{len(names)} columns: correct the line"
            )
        numbers.append(number)
        for column, place in zip(columns, places, strict=True):
            found[column].append(values[place])
    return numbers, found


def parsed(parse: Callable[[str], Value], text: str, what: str, where: str, number: int) -> Value:
    """Convert the text of a value in a line.

    Args:
      parse: a function from a text to a value, which raises ValueError.
      what: a description of the value, for errors.
      where: the name of the file in error messages.
      number: the number of the line.

    Raises:
      DataError: `parse` refuses the text.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise DataError(
            f"data: {where}, line {number}: {what} is {text[:40]!r}, expected a number"
        ) from error


def read_file(path: Path, what: str) -> bytes:
    """Return the content of a user's file.

    Args:
      what: a description of the file, for errors.

    Raises:
      DataError: the file cannot be read, or it is empty.
    """
    with os_errors_as(DataError, f"{what}: {path} cannot be read"):
        content = path.read_bytes()
    if not content:
        raise DataError(f"{what}: {path} is empty")
    return content


def hashed(ids: np.ndarray, size: int, column: int) -> np.ndarray:
    """Hash 64-bit ids (uint64) to int32 in 0 to `size` - 1, by a different hash in each column.

    >>> hashed(np.array([7, 7, 2**63], np.uint64), 1000, 0).tolist()
    [319, 319, 69]
    """
    return (mix(ids ^ mix(np.array([column], np.uint64))) % np.uint64(size)).astype(np.int32)
