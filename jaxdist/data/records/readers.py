"""The readers of records: a split of a Hugging Face data set, and ArrayRecord files."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config.importing import describe_exception
from jaxdist.data.images.files import HELDOUT, TRAIN, check_folder
from jaxdist.data.records.example import parse_example
from jaxdist.errors import DataError


@dataclass(frozen=True)
class Reader:
    """A split of records: mappings from names of columns to values.

    Attributes:
      name: the name of the split in error messages.
      length: the number of records.
      classes: by column, the number of classes, if the files declare this number for the column.
      read: the function that returns the records at int64 indices; encoded images and texts are
        returned as bytes.
    """

    name: str
    length: int
    classes: Mapping[str, int]
    read: Callable[[np.ndarray], list[Mapping[str, Any]]]

    def __len__(self) -> int:
        return self.length


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


def _opened(datasets: Any, name: str, split: Any) -> Reader:
    classes = {}
    for column, feature in split.features.items():
        if isinstance(feature, datasets.Image):
            split = split.cast_column(column, datasets.Image(decode=False))
        elif isinstance(feature, datasets.ClassLabel):
            classes[column] = feature.num_classes
    split = split.with_format("numpy")

    def read(indices: np.ndarray) -> list[Mapping[str, Any]]:
        columns = split[indices.tolist()]
        return [{key: _plain(columns[key][i]) for key in columns} for i in range(len(indices))]

    return Reader(name, len(split), classes, read)


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


def _records(folder: Path, split: str, paths: Sequence[Path], classes: Mapping[str, int]) -> Reader:
    import grain  # The import takes 1.6 s, so only runs that read records pay for it.

    name = f"{folder}, {split}"

    def read(indices: np.ndarray) -> list[Mapping[str, Any]]:
        records = source.__getitems__(indices.tolist())
        named = zip(indices.tolist(), records, strict=True)
        return [parse_example(record, f"record {i} of {name}") for i, record in named]

    try:
        source: Any = grain.sources.ArrayRecordDataSource([str(path) for path in paths])
        return Reader(name, len(source), classes, read)
    except Exception as error:  # The package raises errors of many kinds on damaged files.
        raise DataError(
            f"data.directory: {folder}: the ArrayRecord files of {split} cannot be read: "
            f"{describe_exception(error)}; copy these files again"
        ) from error
