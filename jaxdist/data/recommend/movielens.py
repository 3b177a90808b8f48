"""MovieLens-100K: 100,000 ratings of 1,682 films by 943 people (GroupLens, 1998).

The terms of GroupLens allow research and forbid redistribution. The files are therefore fetched
when they are needed, from the package recbole, which contains them. Cite Harper and Konstan, "The
MovieLens datasets: history and context", ACM TiiS 5(4), 2015.
"""

from __future__ import annotations

import subprocess
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from jaxdist.config.schema import Config
from jaxdist.data.cache import cache_directory, check_published, publish_folder
from jaxdist.data.recommend.rows import parsed, table_of
from jaxdist.data.source import ArraySource, Dataset
from jaxdist.errors import DataError, os_errors_as
from jaxdist.runtime.environment import python_module

PACKAGE = "recbole==1.2.1"
FOLDER = "recbole/dataset_example/ml-100k"
SHA256 = {
    "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
    "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
}
FETCH_SECONDS = 300
LIKED = 4
_OF_FILE = {
    "ml-100k.user": {"age": "age", "gender": "gender", "occupation": "occupation"},
    "ml-100k.item": {"year": "release_year", "genres": "class"},
}
"""For each file, the column of each field that the file has."""
_KEY = {"ml-100k.user": "user_id", "ml-100k.item": "item_id"}

FieldName = Literal["user", "item", "age", "gender", "occupation", "year", "genres"]


class MovieLensConfig(Config):
    """MovieLens-100K: ratings of films from 1 to 5, or whether a film is liked."""

    type: Literal["movielens"]
    """The name that selects MovieLens in a config."""
    target: Literal["rating", "liked"] = "rating"
    """The value to predict: the rating, or 1 for a rating of 4 or more and 0 for a lower rating."""
    fields: Annotated[tuple[FieldName, ...], Field(min_length=1)] = ("user", "item")
    """The categorical fields of an example, each of which has a table: user and item, and
    properties of users and items. Each combination of genres is an id."""
    folds: Annotated[int, Field(ge=2, le=100)] = 5
    """The number of equal parts into which all ratings are divided at random."""
    fold: Annotated[int, Field(ge=0)] = 0
    """The number of the part that is held out, counted from 0."""
    spare: Annotated[int, Field(ge=0)] = 0
    """The number of parts after the held-out part that are not used. For example, 10 folds with 1
    spare part divide the ratings 8:1:1."""
    seed: Annotated[int, Field(ge=0)] = 0
    """The seed of the division into parts; equal seeds give equal parts."""
    directory: str | None = None
    """The folder with ml-100k.inter, ml-100k.user and ml-100k.item; null fetches these files with
    pip."""

    @model_validator(mode="after")
    def _check(self) -> MovieLensConfig:
        if self.fold >= self.folds:
            raise ValueError(
                f"fold {self.fold} does not exist: use a number from 0 to {self.folds - 1}"
            )
        if self.spare > self.folds - 2:
            raise ValueError(
                f"spare {self.spare} of {self.folds} folds leaves no ratings to train on: use a "
                "smaller spare"
            )
        if len(set(self.fields)) < len(self.fields):
            raise ValueError(f"fields names a field twice: {', '.join(self.fields)}")
        return self

    def build(self) -> Dataset:
        """Read all ratings into memory.

        Raises:
          DataError: files are missing, cannot be fetched, or are not the published files.
        """
        files = movielens(self.directory)
        where = "ml-100k.inter"
        names = ("user_id", "item_id", "rating")
        numbers, rated = table_of(files[where], where, names)
        rating = np.array(
            [
                parsed(float, text, "rating", where, n)
                for n, text in zip(numbers, rated["rating"], strict=True)
            ],
            np.float32,
        )
        columns, sizes = _ids(files, rated, self.fields)
        target = rating if self.target == "rating" else (rating >= LIKED).astype(np.float32)
        # NumPy keeps the numbers of RandomState in all versions, so the parts stay the same.
        order = np.random.RandomState(self.seed).permutation(len(target))
        part = np.empty(len(target), np.int64)
        part[order] = np.arange(len(target)) * self.folds // len(target)
        away = (part - self.fold) % self.folds
        train, heldout = (
            ArraySource(ids=columns[rows], target=target[rows])
            for rows in (away > self.spare, away == 0)
        )
        return Dataset(
            train=train,
            heldout=heldout,
            fields=sizes,
            description=(
                f"MovieLens-100K: {len(train):,} + {len(heldout):,} ratings, "
                f"{', '.join(f'{n:,} {name}' for name, n in sizes.items())}"
            ),
        )


def _ids(
    files: Mapping[str, bytes], rated: Mapping[str, list[str]], fields: tuple[FieldName, ...]
) -> tuple[np.ndarray, dict[str, int]]:
    """Return ids int32 `[N, F]` in the order of `fields`, and the number of ids of each field.

    Args:
      files: the contents of the files, by name.
      rated: the columns of the table of ratings.
    """
    keys = {"user": rated["user_id"], "item": rated["item_id"]}
    for file, columns in _OF_FILE.items():
        _, table = table_of(files[file], file, [_KEY[file], *columns.values()])
        row_of = {key: row for row, key in enumerate(table[_KEY[file]])}
        for name, column in columns.items():
            values = table[column]
            rows = rated[_KEY[file]]
            keys[name] = [values[row_of[key]] if key in row_of else "" for key in rows]
    found, sizes = [], dict[str, int]()
    for name in fields:
        known, ids = np.unique(np.array(keys[name]), return_inverse=True)
        found.append(ids.astype(np.int32))
        sizes[name] = len(known)
    return np.stack(found, 1), sizes


def movielens(directory: str | None = None) -> dict[str, bytes]:
    """Return the contents of the three files by name, from a folder, the cache or the package.

    Raises:
      DataError: the files are missing, cannot be fetched, or are not the published files.
    """
    folder = cache_directory() / "ml-100k" if directory is None else Path(directory).expanduser()
    if directory is None and not folder.is_dir():
        _fetch(folder)
    found: dict[str, bytes] = {}
    for name, digest in SHA256.items():
        with os_errors_as(
            DataError,
            f"data: {folder / name} cannot be read",
            f"the file is in the wheel of {PACKAGE}, folder {FOLDER}",
        ):
            content = (folder / name).read_bytes()
        found[name] = check_published(content, digest, str(folder / name))
    return found


def _fetch(folder: Path) -> None:
    """Fetch the wheel of the package recbole with pip, and unpack the files of MovieLens."""
    with tempfile.TemporaryDirectory() as place:
        command = python_module("pip", "download", "--quiet", "--no-deps", PACKAGE)
        try:
            subprocess.run(
                [*command, "--dest", place],
                check=True,
                capture_output=True,
                text=True,
                timeout=FETCH_SECONDS,
            )
            (wheel,) = Path(place).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                files = {name: archive.read(f"{FOLDER}/{name}") for name in SHA256}
        except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
            why = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
            raise DataError(
                f"data: MovieLens-100K is not on this machine and cannot be fetched: "
                f"{why[-1] if why else error}. On a machine with a network, run pip download "
                f"--no-deps {PACKAGE} and unzip the wheel; then set data.directory to the wheel's "
                f"folder {FOLDER}"
            ) from error

    def write(target: Path) -> None:
        for name, content in files.items():
            (target / name).write_bytes(content)

    publish_folder(folder, write)
