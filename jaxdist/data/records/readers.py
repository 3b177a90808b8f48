"""The readers of records: a split of a Hugging Face data set, and ArrayRecord files."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxdist.config.importing import describe_exception
from jaxdist.data.images.files import HELDOUT, TRAIN, check_folder
from jaxdist.data.records.example import parse_example
from jaxdist.errors import DataError


class Reader(Protocol):
    """A split of records: mappings from names of columns to values.

    Attributes:
      name: the name of the split in error messages.
      classes: by column, the number of classes, if the files declare this number for the column.
    """

    name: str
    classes: Mapping[str, int]

    def __len__(self) -> int:
        """Return the number of records."""
        ...

    def read(self, indices: np.ndarray) -> list[Mapping[str, Any]]:
        """Return the records at `indices`; encoded images and texts are returned as bytes."""
        ...


@dataclass
class HuggingFaceSplit:
    """A split of a data set of the package `datasets`; its images stay encoded."""

    name: str
    split: Any
    classes: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.split)

    def read(self, indices: np.ndarray) -> list[Mapping[str, Any]]:
        columns = self.split[indices.tolist()]
        rows = ({key: _plain(columns[key][i]) for key in columns} for i in range(len(indices)))
        return list(rows)


def _plain(value: Any) -> Any:
    """Return the bytes of an encoded image; return any other value unchanged."""
    if not isinstance(value, dict) or not {"bytes", "path"} <= set(value):
        return value
    return value["bytes"] if value["bytes"] is not None else Path(value["path"]).read_bytes()


def hugging_face(folder: Path) -> Mapping[str, Reader]:
    """Open the splits of a data set in a folder from `save_to_disk` or from the hub.

    The result has a reader for each split, by the split's name.

    Raises:
      DataError: the package is not installed, or the folder cannot be read.
    """
    try:
        datasets: Any = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise DataError(
            "data: format huggingface needs the package datasets: pip install 'jaxdist[datasets]'"
        ) from error
    check_folder(folder)
    saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        found = datasets.load_from_disk(folder) if saved else datasets.load_dataset(str(folder))
    except Exception as error:  # The package and pyarrow raise errors of many kinds.
        raise DataError(
            f"data.directory: {folder} cannot be read by the package datasets: "
            f"{describe_exception(error)}; name a folder from save_to_disk or from the hub"
        ) from error
    splits = found if isinstance(found, dict) else {"train": found}
    return {name: _opened(datasets, f"{folder}, {name}", split) for name, split in splits.items()}


def _opened(datasets: Any, name: str, split: Any) -> HuggingFaceSplit:
    classes = {}
    for column, feature in split.features.items():
        if isinstance(feature, datasets.Image):
            split = split.cast_column(column, datasets.Image(decode=False))
        elif isinstance(feature, datasets.ClassLabel):
            classes[column] = feature.num_classes
    return HuggingFaceSplit(name, split.with_format("numpy"), classes)


@dataclass
class ArrayRecordSplit:
    """The records of ArrayRecord files, each a `tf.train.Example`."""

    name: str
    source: Any
    classes: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: np.ndarray) -> list[Mapping[str, Any]]:
        records = self.source.__getitems__(indices.tolist())
        named = zip(indices.tolist(), records, strict=True)
        return [parse_example(record, f"record {i} of {self.name}") for i, record in named]


_FILE = re.compile(
    r"(?:.*[-_.])?(?P<split>[a-z]+)[-_.]?[\d-]*\.array_?record(?:-\d+-of-(?P<of>\d+))?"
)


def array_record(folder: Path) -> Mapping[str, Reader]:
    """Open ArrayRecord files, such as `mnist-train.array_record-00000-of-00001`, by split.

    A file `COLUMN.labels.txt`, as TensorFlow Datasets writes it, has the names of a column's
    classes.

    Raises:
      DataError: the folder has no such files or lacks some of them, or a file is damaged.
    """
    check_folder(folder)
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        name = _FILE.fullmatch(path.name.lower())
        if name is not None and name["split"] in (*TRAIN, *HELDOUT):
            found.setdefault(name["split"], []).append(path)
    for paths in found.values():
        of = _FILE.fullmatch(paths[0].name.lower())
        if of is not None and of["of"] is not None and len(paths) != int(of["of"]):
            raise DataError(
                f"data.directory: {folder} has {len(paths)} of {int(of['of'])} files of "
                f"{paths[0].name}: copy the missing files too"
            )
    classes = dict(_declared(folder))
    return {split: _records(folder, split, paths, classes) for split, paths in found.items()}


def _declared(folder: Path) -> Iterator[tuple[str, int]]:
    for path in folder.glob("*.labels.txt"):
        yield path.name.removesuffix(".labels.txt"), len(path.read_text().split("\n")) - 1


def _records(
    folder: Path, split: str, paths: Sequence[Path], classes: Mapping[str, int]
) -> ArrayRecordSplit:
    import grain  # The import takes 1.6 s, so only runs that read records pay for it.

    try:
        source = grain.sources.ArrayRecordDataSource([str(path) for path in paths])
        return ArrayRecordSplit(f"{folder}, {split}", source, classes)
    except Exception as error:  # The package raises errors of many kinds on damaged files.
        raise DataError(
            f"data.directory: {folder}: the ArrayRecord files of {split} cannot be read: "
            f"{describe_exception(error)}; copy these files again"
        ) from error
