"""Labelled images in files that hold whole arrays: CIFAR's binary files, and npz archives."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdist.config.files import read_regular
from jaxdist.errors import DataError, os_errors_as


class Labelled(NamedTuple):
    """Labelled images in arrays: `image` uint8 [N, H, W, C], 0 to 255, and `label` int32 [N]."""

    image: np.ndarray
    label: np.ndarray


class _Cifar(NamedTuple):
    """The files of a data set of the CIFAR family.

    Attributes:
      labels: the number of label bytes before the pixels. The last label byte is the class.
      classes: the number of classes.
    """

    train: Sequence[str]
    heldout: Sequence[str]
    labels: int
    classes: int


CIFAR: Mapping[str, _Cifar] = {
    "cifar10": _Cifar([f"data_batch_{i}.bin" for i in range(1, 6)], ["test_batch.bin"], 1, 10),
    "cifar100": _Cifar(["train.bin"], ["test.bin"], 2, 100),
}
_SHAPE = (3, 32, 32)
_SPLITS = {"train": ("train",), "heldout": ("test", "val", "heldout")}
_FIELDS = {"image": ("x_{}", "{}_images", "{}_image"), "label": ("y_{}", "{}_labels", "{}_label")}


def cifar(folder: Path, name: str) -> tuple[Labelled, Labelled]:
    """Read the training and the test images of CIFAR-10 or CIFAR-100, in the "binary version".

    An example has a byte for each label, and then 3072 bytes: 32 rows of 32 red values, then as
    many green values, and then as many blue values (https://www.cs.toronto.edu/~kriz/cifar.html).

    Raises:
      DataError: a file is missing or damaged, or has labels out of range; the message names the
        file.
    """
    files = CIFAR[name]
    missing = [part for part in (*files.train, *files.heldout) if not (folder / part).is_file()]
    if missing:
        raise DataError(
            f"data.directory: {folder} lacks {', '.join(missing)} of {name}: unpack the archive "
            f"{name.replace('cifar', 'cifar-')}-binary.tar.gz, and set data.directory to the "
            "folder with its files"
        )
    train, heldout = (
        [_cifar_file(folder / part, files) for part in split]
        for split in (files.train, files.heldout)
    )
    return _joined(train), _joined(heldout)


def _joined(parts: Sequence[Labelled]) -> Labelled:
    image, label = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Labelled(image, label)


def _cifar_file(path: Path, files: _Cifar) -> Labelled:
    content = np.frombuffer(_read(path), np.uint8)
    size = files.labels + int(np.prod(_SHAPE))
    if not len(content) or len(content) % size:
        raise DataError(
            f"data: {path} is damaged: it has {len(content):,} bytes, which is not a multiple of "
            f"{size:,}; fetch the file again"
        )
    rows = content.reshape(-1, size)
    label = rows[:, files.labels - 1].astype(np.int32)
    if label.max() >= files.classes:
        at = int(np.argmax(label >= files.classes))
        raise DataError(
            f"data: {path}: example {at} has the label {label[at]}, expected 0 to "
            f"{files.classes - 1}: the file is damaged, or belongs to another data set"
        )
    image = rows[:, files.labels :].reshape(-1, *_SHAPE).transpose(0, 2, 3, 1)
    return Labelled(np.ascontiguousarray(image), label)


def _read(path: Path) -> bytes:
    with os_errors_as(DataError, f"data: {path} cannot be read"):
        return read_regular(path)


def npz(path: Path) -> tuple[Labelled, Labelled | None]:
    """Read the training and held-out images of an npz archive.

    The arrays are x_train, y_train, x_test and y_test, or train_images, train_labels, test_images
    and test_labels (MedMNIST). The names may have val or heldout instead of test. If the archive
    has no held-out arrays, the held-out images are None. Nothing is unpickled.

    Raises:
      DataError: the file is not an npz archive, or an array is missing or cannot be read.
    """
    failed = f"data.directory: {path} cannot be read as npz"
    remedy = "name an archive that numpy.savez wrote"
    with (
        os_errors_as(DataError, failed, remedy, also=(ValueError, zipfile.BadZipFile)),
        np.load(path, allow_pickle=False) as archive,
    ):
        arrays = {name: archive[name] for name in archive.files}
    train, heldout = (_npz_split(arrays, split, path) for split in _SPLITS)
    if train is None:
        raise DataError(
            f"data.directory: {path} holds {', '.join(sorted(arrays)) or 'nothing'}, expected "
            "x_train and y_train (and x_test, y_test), or train_images and train_labels: save the "
            "arrays under these names"
        )
    return train, heldout


def _npz_split(arrays: Mapping[str, np.ndarray], split: str, path: Path) -> Labelled | None:
    found: dict[str, np.ndarray] = {}
    for field, patterns in _FIELDS.items():
        names = [pattern.format(word) for word in _SPLITS[split] for pattern in patterns]
        name = next((name for name in names if name in arrays), None)
        if name is not None:
            found[field] = arrays[name]
    if len(found) == 1:
        lacks = "labels" if "image" in found else "images"
        raise DataError(
            f"data.directory: {path} has no {lacks} for the split {split}: add the array of the "
            f"{lacks} to the archive"
        )
    if not found:
        return None
    image, label = found["image"], found["label"]
    if image.dtype != np.uint8:
        raise DataError(
            f"data.directory: images of {path} are {image.dtype}, expected uint8, 0 to 255"
        )
    if label.ndim == 2 and label.shape[1] == 1:
        label = label[:, 0]
    return labelled(image, label, f"{path}, {split}")


def labelled(image: np.ndarray, label: np.ndarray, name: str) -> Labelled:
    """Return checked images and labels, in which images have a dim of channels.

    Args:
      name: the name of the file, for errors.

    Raises:
      DataError: images do not have 3 or 4 dims, or labels have more than 1; the numbers of images
        and labels differ; or labels are negative, are not integers, or do not fit in 32 bits.
    """
    if image.ndim not in (3, 4) or label.ndim != 1 or len(image) != len(label):
        raise DataError(
            f"data: {name}: images {image.shape} and labels {label.shape} have shapes that do not "
            "fit each other; expected images [N, H, W] or [N, H, W, C] and labels [N]"
        )
    least, most = (label.min(), label.max()) if len(label) else (0, 0)
    if label.dtype.kind not in "iu" or least < 0 or most > np.iinfo(np.int32).max:
        raise DataError(
            f"data: {name}: labels are {label.dtype} from {least} to {most}, expected integers "
            "from 0, the numbers of classes"
        )
    image = image[..., None] if image.ndim == 3 else image
    return Labelled(image, label.astype(np.int32))
