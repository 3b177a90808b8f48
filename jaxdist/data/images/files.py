"""Labelled images in files: a folder for each class, or tars of the webdataset format.

Images are decoded when a batch is read; only their locations and labels are in memory.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdist.data.source import BatchSource, Dataset, Example, Source
from jaxdist.errors import DataError, os_errors_as, some_of

SUFFIXES = (".jpg", ".jpeg", ".png")
TRAIN = ("train", "training")
HELDOUT = ("val", "valid", "validation", "test", "heldout")
_SHOWN = 5


class ImagePlace(NamedTuple):
    """The location of an image's bytes: a file, or a part of a file such as a tar.

    Attributes:
      length: the number of bytes, or -1 for all bytes up to the end of the file.
    """

    path: str
    start: int = 0
    length: int = -1

    def read(self) -> bytes:
        with Path(self.path).open("rb") as file:
            file.seek(self.start)
            return file.read(self.length)

    def __str__(self) -> str:
        return self.path if self.length < 0 else f"{self.path} at byte {self.start:,}"


@dataclass(frozen=True)
class EncodedImages(BatchSource):
    """A source of images that are decoded when they are read.

    Attributes:
      places: the location of each image's bytes.
      labels: the label of each image, int32 [N].
      size: the side of the square to which images are scaled and cropped, in pixels. None keeps the
        size of the images, which must then be the same for all.
    """

    places: Sequence[ImagePlace]
    labels: np.ndarray
    size: int | None

    def __len__(self) -> int:
        return len(self.places)

    def take(self, indices: np.ndarray) -> Example:
        first = self._first
        images = list(decoders().map(self._decoded, indices.tolist()))
        for index, image in zip(indices.tolist(), images, strict=True):
            if image.shape != first:
                raise DataError(
                    f"data: {self.places[index]} has {image.shape[1]} x {image.shape[0]} pixels, "
                    f"and {self.places[0]} has {first[1]} x {first[0]}: all images need the same "
                    "size. Set data.size, the side of the square to which images are scaled and "
                    "cropped"
                )
        image = np.stack(images) if images else np.empty((0, *first), np.uint8)
        return {"image": image, "label": self.labels[indices]}

    @cached_property
    def _first(self) -> tuple[int, ...]:
        """The shape of the first image, [H, W, 3], which all images must have."""
        return self._decoded(0).shape

    def _decoded(self, index: int) -> np.ndarray:
        place = self.places[index]
        return decode_image(place.read, place, self.size)


@cache
def decoders() -> ThreadPoolExecutor:
    """Return the pool of threads that decode images.

    Threads suffice, because the decoders of JPEG and PNG release the interpreter lock.
    """
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="decode")


def decode_image(read: Callable[[], bytes], name: object, size: int | None) -> np.ndarray:
    """Decode a JPEG or PNG to uint8 [H, W, 3].

    Args:
      read: a function that returns the image's bytes.
      name: the image's name or location, for error messages.
      size: the side of a square, in pixels. The shorter side is scaled to this size, and the longer
        side is cropped at both ends. None keeps the image's size.

    Raises:
      DataError: the file is broken, or cannot be read.
    """
    # Pillow is imported here, because its import takes 40 ms and only users of image files need it.
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(read())) as image:
            if size is not None:
                # A draft decodes a JPEG in less time, at an eighth, a quarter or half of its size.
                image.draft("RGB", (size, size))
            pixels = image.convert("RGB")
            if size is not None:
                pixels = ImageOps.fit(pixels, (size, size), Image.Resampling.BILINEAR)
            return np.asarray(pixels)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        # Pillow's message on an unknown format has the address of an object, so it is not shown.
        unknown = isinstance(error, UnidentifiedImageError)
        why = "neither JPEG nor PNG" if unknown else error
        raise DataError(
            f"data: {name} is not an image that can be read ({why}): remove the file, or set "
            "data.skip_broken: true"
        ) from error


class Listing(NamedTuple):
    """The locations of the images of a split, and the name of each image's class."""

    places: Sequence[ImagePlace]
    names: Sequence[str]


def check_folder(folder: Path) -> None:
    """Raise a DataError if the setting data.directory is not a folder."""
    if not folder.is_dir():
        raise DataError(f"data.directory: {folder} is not a folder: name the folder of the files")


def image_files(folder: Path, size: int | None, *, skip_broken: bool, tars: bool) -> Dataset:
    """List the training and the held-out images in a folder.

    The description of the data set also names the classes without held-out images, and broken files
    that were left out.

    Args:
      size: the side of the square to which images are scaled and cropped; see `EncodedImages`.
      skip_broken: whether to decode every image once, and leave out broken images.
      tars: whether the folder holds tars of the webdataset format; otherwise it holds a folder for
        each class.

    Raises:
      DataError: the folder has no images or a single class, held-out images have classes that
        training lacks, or a tar or all images are broken.
    """
    check_folder(folder)
    listed = _tars(folder) if tars else _folders(folder)
    train = listed["train"]
    heldout = listed.get("heldout")
    classes = sorted(set(train.names))
    # Tars and numbered folders have numbers as names of classes. A sort of these names as text
    # would put 10 before 2.
    if all(name.isdecimal() for name in classes):
        classes = sorted(classes, key=int)
    if heldout is not None and (other := set(heldout.names) - set(classes)):
        raise DataError(
            f"data.directory: {folder}: the held-out images have classes that the training images "
            f"lack: {some_of(sorted(other), _SHOWN)}; training has {some_of(classes, _SHOWN)}: "
            "remove the folders of these classes, or add training images of these classes"
        )
    if len(classes) == 1:
        raise DataError(
            f"data.directory: {folder}: all images to train on have the class {classes[0]}, and a "
            "classifier needs two or more: expected a folder for each class, or several numbers "
            "in the .cls files of tars"
        )
    numbers = {name: i for i, name in enumerate(classes)}
    splits, broken = [], []
    for listing in (train, heldout):
        if listing is None:
            splits.append(None)
            continue
        if skip_broken:
            listing, lost = _whole(listing)
            broken += lost
        labels = np.array([numbers[name] for name in listing.names], np.int32)
        splits.append(EncodedImages(listing.places, labels, size))
    absent = [] if heldout is None else sorted({*classes} - {*heldout.names})
    note = f"; without held-out images: {some_of(absent, _SHOWN)}" if absent else ""
    note += f"; {len(broken)} broken files left out: {some_of(broken, _SHOWN)}" if broken else ""
    name = f"{'tars' if tars else 'files'} in {folder}"
    described = describe_images(name, splits, splits[0][0]["image"].shape, len(classes))
    return Dataset(splits[0], splits[1], classes=len(classes), description=described + note)


def describe_images(
    name: str, splits: Sequence[Source | None], shape: tuple[int, ...], classes: int
) -> str:
    """Return a line with the number of images of each split, their shape and their classes."""
    counts = " + ".join(f"{len(split):,}" for split in splits if split is not None)
    return f"images: {name}: {counts} of {' x '.join(map(str, shape))} in {classes} classes"


def _whole(listing: Listing) -> tuple[Listing, list[str]]:
    """Decode every image once; return the listing without broken images, and the broken files.

    Raises:
      DataError: all images are broken.
    """
    kept, broken = [], []
    for place, name in zip(listing.places, listing.names, strict=True):
        try:
            # At size 1 a JPEG is decoded in the least time.
            decode_image(place.read, place, 1)
        except DataError:
            broken.append(str(place))
        else:
            kept.append((place, name))
    if not kept:
        raise DataError(f"data: all {len(broken)} images are broken: {some_of(broken, _SHOWN)}")
    places, names = zip(*kept, strict=True)
    return Listing(places, names), broken


def _folders(folder: Path) -> Mapping[str, Listing]:
    """Return the images of each split, from folders of splits that contain folders of classes.

    If there are no folders of splits, all classes are in the training split.
    """
    splits = {
        split: next((folder / name for name in names if (folder / name).is_dir()), None)
        for split, names in (("train", TRAIN), ("heldout", HELDOUT))
    }
    if splits["train"] is None:
        if splits["heldout"] is not None:
            raise DataError(
                f"data.directory: {folder} has {splits['heldout'].name}/ and no train/: expected "
                "train/CLASS/*.jpg, or CLASS/*.jpg without a held-out split"
            )
        return {"train": _folder(folder)}
    return {split: _folder(path) for split, path in splits.items() if path is not None}


def _folder(folder: Path) -> Listing:
    places, names = [], []
    for child in sorted(folder.iterdir()):
        if child.is_dir():
            # Data sets may link to folders. `os.walk` follows these links, but `Path.rglob` does
            # not.
            for root, _, files in sorted(os.walk(child, followlinks=True)):
                for file in sorted(files):
                    if file.lower().endswith(SUFFIXES):
                        places.append(ImagePlace(f"{root}/{file}"))
                        names.append(child.name)
    if not places:
        raise DataError(
            f"data.directory: {folder} has no images: expected a folder for each class, with "
            f"files that end in {', '.join(SUFFIXES)}"
        )
    return Listing(places, names)


def _tars(folder: Path) -> Mapping[str, Listing]:
    """Return the images of each split, from the tars `train-*.tar` and `val-*.tar`.

    A tar has each image as NAME.jpg, and the number of its class as NAME.cls.
    """
    found = {}
    for split, names in (("train", TRAIN), ("heldout", HELDOUT)):
        paths = sorted(path for path in folder.glob("*.tar") if path.name.lower().startswith(names))
        if paths:
            pairs = [pair for path in paths for pair in _tar(path)]
            found[split] = Listing(*zip(*pairs, strict=True))
    if "train" not in found:
        held = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise DataError(
            f"data.directory: {folder} has no train*.tar (it holds: {held}): expected train-*.tar "
            "and val-*.tar of the webdataset format"
        )
    return found


def _tar(path: Path) -> list[tuple[ImagePlace, str]]:
    """Return the location and the class of each image in a tar, by one pass over its headers."""
    places: dict[str, ImagePlace] = {}
    labels: dict[str, str] = {}
    failed, again = f"data: {path} is not a tar that can be read", "fetch the file again"
    with (
        os_errors_as(DataError, failed, again, also=(tarfile.TarError, UnicodeDecodeError)),
        tarfile.open(path, "r:") as tar,
    ):
        for member in tar:
            stem, dot, suffix = member.name.rpartition(".")
            if not member.isfile() or not dot:
                continue
            if f".{suffix.lower()}" in SUFFIXES:
                places[stem] = ImagePlace(str(path), member.offset_data, member.size)
            elif suffix == "cls":
                content = tar.extractfile(member)
                labels[stem] = content.read().decode().strip() if content else ""
        end = tar.offset
    # Python's tarfile ends without an error at a header that is cut off; a complete tar ends with
    # zeros.
    if ImagePlace(str(path), end, tarfile.BLOCKSIZE).read() != bytes(tarfile.BLOCKSIZE):
        raise DataError(
            f"data: {path} is truncated at byte {end:,}, after {len(places)} images: copy it again"
        )
    for stem in places:
        label = labels.get(stem, "")
        if not label.isdecimal():
            raise DataError(
                f"data: {path}: {stem} has the label {label!r}, expected a number in "
                f"{stem}.cls: correct the label"
            )
    if not places:
        raise DataError(f"data: {path} has no images ({', '.join(SUFFIXES)})")
    return [(place, str(int(labels[stem]))) for stem, place in places.items()]
