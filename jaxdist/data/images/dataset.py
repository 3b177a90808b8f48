"""Labelled images from files: Fashion-MNIST, scikit-learn's digits, or any IDX files."""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import model_validator

from jaxdist.config.schema import Config
from jaxdist.data.images.fashion_mnist import fashion_mnist
from jaxdist.data.images.idx import parse_idx, read_idx_content
from jaxdist.data.source import ArraySource, Dataset
from jaxdist.data.transform import TransformConfig, transformed
from jaxdist.errors import DataError

_DIGITS = 1797
_DIGITS_SEED = 0
_DIGITS_HELDOUT = 5  # one in five


class Labelled(NamedTuple):
    """Labelled images: `image` uint8 [N, H, W, C], 0 to 255; `label` int32 [N]."""

    image: np.ndarray
    label: np.ndarray


class ImagesConfig(Config):
    """Images (uint8 [H, W, C], 0 to 255), each with a label."""

    type: Literal["images"] = "images"
    """Labelled images."""
    source: Literal["fashion-mnist", "digits", "idx"]
    """Fashion-MNIST (70,000, 28 x 28), handwritten digits (1,797, 8 x 8), or your own IDX files."""
    directory: str | None = None
    """Folder of the IDX files (train-images*, train-labels*, t10k-*); only for source idx."""
    transform: TransformConfig | None = None
    """Transform of each image; null passes on uint8, 0 to 255 (our own loss divides by 255)."""

    @model_validator(mode="after")
    def _directory_belongs_to_idx(self) -> ImagesConfig:
        if self.source == "idx" and self.directory is None:
            raise ValueError("source 'idx' needs directory, the folder of the IDX files")
        if self.source != "idx" and self.directory is not None:
            raise ValueError(
                f"directory {self.directory!r} is not read with source {self.source!r}: drop it, "
                "or set source to 'idx'"
            )
        return self

    def build(self) -> Dataset:
        """Load every image into memory untransformed; `transform` is applied when images are read.

        Raises:
          DataError: missing, damaged or contradictory files; no scikit-learn for the digits.
          ConfigError: a transform that cannot be imported.
        """
        return transformed(self._images(), self.transform)

    def _images(self) -> Dataset:
        if self.source == "digits":
            return _dataset("digits of scikit-learn", *_digits())
        if self.source == "fashion-mnist":
            return _dataset("Fashion-MNIST", *_fashion_mnist())
        assert self.directory is not None
        folder = Path(self.directory).expanduser()
        return _dataset(f"IDX files in {folder}", *_idx_folder(folder))


def _dataset(name: str, train: Labelled, heldout: Labelled | None) -> Dataset:
    splits = [train] if heldout is None else [train, heldout]
    shapes = {split.image.shape[1:] for split in splits}
    if len(shapes) > 1:
        raise DataError(f"data: {name}: training and held-out images differ in shape: {shapes}")
    if min(len(split.label) for split in splits) == 0:
        raise DataError(f"data: {name}: a split has no images")
    classes = 1 + max(int(split.label.max()) for split in splits)
    examples = [len(split.label) for split in splits]
    height, width, channels = train.image.shape[1:]
    return Dataset(
        train=ArraySource(**train._asdict()),
        heldout=None if heldout is None else ArraySource(**heldout._asdict()),
        vocab_size=None,
        classes=classes,
        description=f"images: {name}: {' + '.join(f'{n:,}' for n in examples)} of "
        f"{height} x {width} x {channels} in {classes} classes",
        facts={
            "train_examples": examples[0],
            "heldout_examples": sum(examples[1:]),
            "height": height,
            "width": width,
            "channels": channels,
            "bytes": sum(split.image.nbytes for split in splits),
        },
    )


def _digits() -> tuple[Labelled, Labelled]:
    table = _digits_table()
    order = np.random.RandomState(_DIGITS_SEED).permutation(len(table))
    # Their values 0 to 16 become 0 to 255.
    pixels = table[order, :-1].reshape(-1, 8, 8, 1)
    image = np.round(pixels * (255 / 16)).astype(np.uint8)
    label = table[order, -1].astype(np.int32)
    cut = len(label) - len(label) // _DIGITS_HELDOUT
    return Labelled(image[:cut], label[:cut]), Labelled(image[cut:], label[cut:])


def _digits_table() -> np.ndarray:
    """Read float64 [1797, 65], 64 pixels and the label, from the file in the scikit-learn package.

    scikit-learn is not imported, which would take a quarter of a small run's time.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError("data: source 'digits' needs scikit-learn: pip install 'jaxdist[images]'")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        return np.loadtxt(path, delimiter=",").reshape(_DIGITS, 65)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(
            f"data: scikit-learn's file of digits cannot be read ({error}): "
            "pip install --force-reinstall scikit-learn"
        ) from error


def _fashion_mnist() -> tuple[Labelled, Labelled]:
    files = fashion_mnist()
    train, heldout = (
        _labelled(
            parse_idx(files[f"{split}-images-idx3-ubyte"], f"{split} images"),
            parse_idx(files[f"{split}-labels-idx1-ubyte"], f"{split} labels"),
            split,
        )
        for split in ("train", "t10k")
    )
    return train, heldout


def _idx_folder(folder: Path) -> tuple[Labelled, Labelled | None]:
    if not folder.is_dir():
        raise DataError(f"data.directory: {folder} is not a folder")
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
            return _labelled(_parse(images), _parse(labels), f"{folder}/{prefix}-*")
        if images or labels:
            raise DataError(
                f"data.directory: {images or labels} has no partner: expected both "
                f"{prefix}-images* and {prefix}-labels* in {folder}"
            )
    return None


def _parse(path: Path) -> np.ndarray:
    return parse_idx(read_idx_content(path), str(path))


def _only(folder: Path, pattern: str) -> Path | None:
    paths = sorted(folder.glob(pattern))
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise DataError(f"data.directory: {folder} has several {pattern}: {names}; keep one")
    return paths[0] if paths else None


def _labelled(image: np.ndarray, label: np.ndarray, name: str) -> Labelled:
    if image.ndim not in (3, 4) or label.ndim != 1 or len(image) != len(label):
        raise DataError(
            f"data: {name}: images {image.shape} and labels {label.shape} do not belong together, "
            "expected [N, H, W] or [N, H, W, C] and [N]"
        )
    image = image[..., None] if image.ndim == 3 else image
    return Labelled(image, label.astype(np.int32))
