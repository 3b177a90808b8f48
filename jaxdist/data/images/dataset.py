"""Labelled images: Fashion-MNIST, scikit-learn's digits, or the user's files in five formats."""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import model_validator

from jaxdist.config.schema import Config, Count
from jaxdist.data.images.arrays import CIFAR, Labelled, cifar, labelled, npz
from jaxdist.data.images.fashion_mnist import fashion_mnist
from jaxdist.data.images.files import check_folder, describe_images, image_files
from jaxdist.data.images.idx import parse_idx, read_idx_content
from jaxdist.data.source import ArraySource, Dataset
from jaxdist.data.transform import TransformConfig, transformed
from jaxdist.errors import DataError, os_errors_as

_DIGITS = 1797
_DIGITS_SEED = 0
_DIGITS_HELDOUT = 5
"""The number n such that one of n digits is held out."""


class ImagesConfig(Config):
    """Images (uint8 [H, W, C], 0 to 255), each with a label."""

    type: Literal["images"] = "images"
    """The name that selects labelled images in a config."""
    source: Literal[
        "fashion-mnist", "digits", "idx", "cifar10", "cifar100", "npz", "folder", "tars"
    ]
    """The origin of the images. fashion-mnist (70,000 images of 28 x 28 pixels) and digits (1,797
    handwritten digits of 8 x 8 pixels) need no directory. idx reads IDX files, and cifar10 and
    cifar100 read the binary files of CIFAR. npz reads an archive with x_train, y_train, x_test and
    y_test. folder reads JPEG and PNG files in a folder for each class (train/CLASS/*.jpg,
    val/CLASS/*.jpg). tars reads tars of the webdataset format (train-*.tar, val-*.tar, with
    NAME.jpg and NAME.cls)."""
    directory: str | None = None
    """The folder of the files or, for npz, the path of the archive. null is only for sources that
    need no directory."""
    size: Count | None = None
    """The side, in pixels, of the square to which images of the sources folder and tars are scaled
    and cropped. null keeps their size, which must then be the same for all images."""
    skip_broken: bool = False
    """Whether to leave out image files that cannot be decoded. With true, each file is decoded once
    at the start; with false, the first broken file ends the run."""
    transform: TransformConfig | None = None
    """The transform of each image. null keeps uint8 values from 0 to 255, which jaxdist's losses
    divide by 255."""

    @model_validator(mode="after")
    def _check_directory(self) -> ImagesConfig:
        built_in = self.source in ("fashion-mnist", "digits")
        if not built_in and self.directory is None:
            what = "the path of the archive" if self.source == "npz" else "the folder of its files"
            raise ValueError(f"source {self.source!r} needs the setting directory, {what}")
        if built_in and self.directory is not None:
            raise ValueError(
                f"directory {self.directory!r} has no effect with source {self.source!r}: leave "
                "directory out, or set source to 'idx', 'cifar10', 'cifar100', 'npz', 'folder' or "
                "'tars'"
            )
        if self.source not in ("folder", "tars") and (self.size or self.skip_broken):
            name = "size" if self.size else "skip_broken"
            raise ValueError(
                f"{name} has an effect only with the sources 'folder' and 'tars': leave {name} out"
            )
        return self

    def build(self) -> Dataset:
        """Load the data set; `transform` is applied when a batch is read.

        Raises:
          DataError: files are missing, damaged or contradictory; scikit-learn, which the digits
            need, is not installed.
          ConfigError: the transform cannot be imported.
        """
        return transformed(self._images(), self.transform)

    def _images(self) -> Dataset:
        if self.source == "digits":
            return _dataset("digits of scikit-learn", *_digits())
        if self.source == "fashion-mnist":
            return _dataset("Fashion-MNIST", *_fashion_mnist())
        assert self.directory is not None
        folder = Path(self.directory).expanduser()
        if self.source in CIFAR:
            return _dataset(f"{self.source} in {folder}", *cifar(folder, self.source))
        if self.source == "npz":
            return _dataset(f"arrays of {folder}", *npz(folder))
        if self.source == "idx":
            return _dataset(f"IDX files in {folder}", *_idx_folder(folder))
        tars = self.source == "tars"
        return image_files(folder, self.size, skip_broken=self.skip_broken, tars=tars)


def _dataset(name: str, train: Labelled, heldout: Labelled | None) -> Dataset:
    splits = [train] if heldout is None else [train, heldout]
    shapes = {split.image.shape[1:] for split in splits}
    if len(shapes) > 1:
        raise DataError(
            f"data: {name}: training and held-out images differ in shape: {shapes}; crop or pad "
            "all images to the same shape"
        )
    if min(len(split.label) for split in splits) == 0:
        raise DataError(f"data: {name}: a split has no images")
    classes = 1 + int(train.label.max())
    if heldout is not None and (beyond := heldout.label >= classes).any():
        raise DataError(
            f"data: {name}: {beyond.sum()} held-out images have labels that the training images "
            f"lack, such as {heldout.label.max()}; the training labels are 0 to {classes - 1}. "
            "Remove these held-out images, or add training images of their classes"
        )
    train_source = ArraySource(**train._asdict())
    heldout_source = None if heldout is None else ArraySource(**heldout._asdict())
    sources = train_source, heldout_source
    described = describe_images(name, sources, train.image.shape[1:], classes)
    return Dataset(*sources, classes=classes, description=described)


def _digits() -> tuple[Labelled, Labelled]:
    table = _digits_table()
    # NumPy keeps the numbers of RandomState in all versions, so the split stays the same.
    order = np.random.RandomState(_DIGITS_SEED).permutation(len(table))
    # The pixels of the digits are 0 to 16, which become 0 to 255.
    pixels = table[order, :-1].reshape(-1, 8, 8, 1)
    image = np.round(pixels * (255 / 16)).astype(np.uint8)
    label = table[order, -1].astype(np.int32)
    cut = len(label) - len(label) // _DIGITS_HELDOUT
    return Labelled(image[:cut], label[:cut]), Labelled(image[cut:], label[cut:])


def _digits_table() -> np.ndarray:
    """Return the digits as float64 [1797, 65], where a row has the 64 pixels and the label.

    The function reads the file in the scikit-learn package, but does not import scikit-learn,
    because the import would take a quarter of a small run's time.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError("data: source 'digits' needs scikit-learn: pip install 'jaxdist[images]'")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    failed = "data: scikit-learn's file of digits cannot be read"
    remedy = "pip install --force-reinstall scikit-learn"
    with os_errors_as(DataError, failed, remedy, also=(EOFError, ValueError, zlib.error)):
        return np.loadtxt(path, delimiter=",").reshape(_DIGITS, 65)


def _fashion_mnist() -> tuple[Labelled, Labelled]:
    files = fashion_mnist()
    train, heldout = (
        labelled(
            parse_idx(files[f"{split}-images-idx3-ubyte"], f"{split} images"),
            parse_idx(files[f"{split}-labels-idx1-ubyte"], f"{split} labels"),
            split,
        )
        for split in ("train", "t10k")
    )
    return train, heldout


def _idx_folder(folder: Path) -> tuple[Labelled, Labelled | None]:
    check_folder(folder)
    train = _idx_split(folder, ["train"])
    if train is None:
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:8])
        raise DataError(
            f"data.directory: {folder} has no train-images* and train-labels* (it holds: "
            f"{names or 'nothing'})"
        )
    return train, _idx_split(folder, ["t10k", "test"])


def _idx_split(folder: Path, prefixes: Iterable[str]) -> Labelled | None:
    for prefix in prefixes:
        images = _only(folder, f"{prefix}-images*")
        labels = _only(folder, f"{prefix}-labels*")
        if images and labels:
            return labelled(_parse(images), _parse(labels), f"{folder}/{prefix}-*")
        if images or labels:
            raise DataError(
                f"data.directory: {images or labels} is only one of two required files: expected "
                f"both {prefix}-images* and {prefix}-labels* in {folder}"
            )
    return None


def _parse(path: Path) -> np.ndarray:
    return parse_idx(read_idx_content(path), str(path))


def _only(folder: Path, pattern: str) -> Path | None:
    paths = sorted(folder.glob(pattern))
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise DataError(
            f"data.directory: {folder} has several files {pattern}: {names}; keep only one of "
            "these files"
        )
    return paths[0] if paths else None
