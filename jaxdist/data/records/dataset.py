"""Readers of Hugging Face data sets and ArrayRecord files with columns of numbers and images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from jaxdist.config.importing import describe_exception
from jaxdist.config.schema import Config, Count
from jaxdist.data.images.files import HELDOUT, TRAIN, decode_image, decoders
from jaxdist.data.records.readers import Reader, array_record, hugging_face
from jaxdist.data.source import BatchSource, Dataset, Example, Source, narrow
from jaxdist.data.transform import TransformConfig, transformed
from jaxdist.errors import DataError

_SHOWN = 5


class RecordsConfig(Config):
    """Columns of numbers and images, in files of other frameworks."""

    type: Literal["records"]
    """The name that selects data in records in a config."""
    format: Literal["huggingface", "array_record"]
    """The format of the files. huggingface is a data set of the package datasets, from save_to_disk
    or from a downloaded folder of the hub. array_record is ArrayRecord files of tf.train.Example,
    as TensorFlow Datasets writes them (train*.array_record,
    NAME-train.array_record-00000-of-00001)."""
    directory: str
    """The folder of the files with the records."""
    columns: dict[str, str] = Field(default={})
    """The column of each field of an example, by the field's name. An empty mapping takes all
    columns under their own names."""
    size: Count | None = None
    """The side, in pixels, of the square to which images are scaled and cropped. null keeps their
    size, which must then be the same for all images."""
    skip_broken: bool = False
    """Whether to leave out records with an image that cannot be decoded. With true, each record is
    decoded once at the start; with false, the first broken record ends the run."""
    vocab_size: Count | None = None
    """The size of the vocabulary: `tokens` are numbers from 0 to vocab_size - 1. null is for data
    without tokens."""
    classes: Count | None = None
    """The number of classes: `label` is a number from 0 to classes - 1. null takes the number that
    the files declare."""
    transform: TransformConfig | None = None
    """The transform of each image. null keeps uint8 values from 0 to 255, which jaxdist's losses
    divide by 255."""

    def build(self) -> Dataset:
        """Open the files; records are read and decoded when a batch is read.

        Raises:
          DataError: files are missing, damaged or contradictory; columns are missing or have no
            numbers; the package datasets is not installed.
          ConfigError: the transform cannot be imported.
        """
        folder = Path(self.directory).expanduser()
        found = hugging_face(folder) if self.format == "huggingface" else array_record(folder)
        train = next((found[name] for name in TRAIN if name in found), None)
        if train is None:
            raise DataError(
                f"data.directory: {folder} has no training split in format {self.format} (it has: "
                f"{', '.join(found) or 'none'}): name the folder with the training split"
            )
        heldout = next((found[name] for name in HELDOUT if name in found), None)
        broken: list[str] = []
        splits = [
            None if reader is None else self._split(reader, broken) for reader in (train, heldout)
        ]
        assert splits[0] is not None
        examples = [0 if split is None else len(split) for split in splits]
        note = f"; {len(broken)} broken records left out: " if broken else ""
        note += ", ".join(broken[:_SHOWN])
        label = self.columns.get("label", "label")
        dataset = Dataset(
            train=splits[0],
            heldout=splits[1],
            vocab_size=self.vocab_size,
            classes=train.classes.get(label) if self.classes is None else self.classes,
            description=f"records: {self.format} in {folder}: {examples[0]:,} + {examples[1]:,} "
            f"examples{note}",
        )
        return transformed(dataset, self.transform)

    def _split(self, reader: Reader, broken: list[str]) -> Source:
        records = Records(reader, self.columns, self.size, np.arange(len(reader)))
        if not self.skip_broken:
            return records
        kept = []
        for index in range(len(records)):
            try:
                records.read(np.array([index]))
            except BrokenImageError:
                broken.append(f"{index} of {reader.name}")
            else:
                kept.append(index)
        if not kept:
            raise DataError(
                f"data: all {len(reader)} records of {reader.name} are broken: fetch the files "
                "again"
            )
        return replace(records, kept=np.array(kept))


class BrokenImageError(DataError):
    """The error of a record whose image cannot be decoded."""


@dataclass(frozen=True)
class Records(BatchSource):
    """A source of records.

    Attributes:
      columns: for each field, the name of its column, or {} for all columns under their own names.
      size: the side of the square to which images are scaled and cropped, or None if the images
        have equal sizes.
      kept: the indices of the records that are examples.
    """

    reader: Reader
    columns: Mapping[str, str]
    size: int | None
    kept: np.ndarray

    def __len__(self) -> int:
        return len(self.kept)

    def take(self, indices: np.ndarray) -> Example:
        read = self.kept[indices]
        first, rows = self._first, self.read(read)
        for index, row in zip(read.tolist(), rows, strict=True):
            for name, value in first.items():
                if (row[name].shape, row[name].dtype) != (value.shape, value.dtype):
                    raise DataError(
                        f"data: {name!r} of record {index} of {self.reader.name} is "
                        f"{row[name].dtype} {row[name].shape}, and the first is {value.dtype} "
                        f"{value.shape}: set data.size for images, or pad the records to one shape"
                    )
        return {
            name: np.array([row[name] for row in rows], value.dtype).reshape(-1, *value.shape)
            for name, value in first.items()
        }

    @cached_property
    def _first(self) -> Mapping[str, np.ndarray]:
        return self.read(self.kept[:1])[0]

    def read(self, indices: np.ndarray) -> list[Mapping[str, np.ndarray]]:
        """Read and decode records by their indices, which differ from the indices of examples."""
        if not len(indices):
            return []
        names = [f"record {index} of {self.reader.name}" for index in indices.tolist()]
        try:
            found = self.reader.read(indices)
        except DataError:
            raise
        except Exception as error:  # Packages raise errors of many kinds on damaged files.
            raise DataError(
                f"data: {self.reader.name} cannot be read, from {names[0]} on: "
                f"{describe_exception(error)}"
            ) from error
        return list(decoders().map(self._fields, found, names))

    def _fields(self, row: Mapping[str, Any], name: str) -> Mapping[str, np.ndarray]:
        columns = self.columns or {column: column for column in row}
        if absent := [column for column in columns.values() if column not in row]:
            raise DataError(
                f"data.columns: {name} has no column {', '.join(absent)}; choose from "
                f"{', '.join(sorted(row))}"
            )
        return {key: self._value(row[column], column, name) for key, column in columns.items()}

    def _value(self, value: Any, column: str, name: str) -> np.ndarray:
        # A `tf.train.Example` stores a single value as a list of one value.
        value = (
            value[0] if isinstance(value, list | np.ndarray) and np.shape(value) == (1,) else value
        )
        if isinstance(value, bytes):
            try:
                return decode_image(lambda: value, f"{column!r} of {name}", self.size)
            except DataError as error:
                raise BrokenImageError(
                    f"{error}; if this column has no images, list the columns to "
                    "read in data.columns"
                ) from error
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise DataError(
                f"data: {column!r} of {name} is {array.dtype}, expected numbers or an "
                "image: name the columns to read in data.columns, and tokenize texts "
                "before training"
            )
        return narrow(f"{column!r} of {name}", array)
