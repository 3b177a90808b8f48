"""CIFAR's binary files, npz archives, folders of image files, and tars."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxdist.config import Document, validate
from jaxdist.data import ImagesConfig
from jaxdist.data.source import Dataset, take
from jaxdist.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 9, 8, 3), dtype=np.uint8)


def build(source: str, directory: Path, **settings: Any) -> Dataset:
    values = {"type": "images", "source": source, "directory": str(directory), **settings}
    return validate(Document(values), ImagesConfig).build()


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def cifar10(folder: Path, *, label: int = 3) -> np.ndarray:
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 256, (12, 3073), dtype=np.uint8)
    rows[:, 0] = np.arange(12) % 10
    rows[11, 0] = label
    names = [f"data_batch_{i}.bin" for i in range(1, 6)]
    for name, part in zip([*names, "test_batch.bin"], rows.reshape(6, 2, -1), strict=True):
        write(folder / name, part.tobytes())
    return rows


def test_cifar_10_is_red_green_blue_planes_after_a_label(tmp_path: Path) -> None:
    rows = cifar10(tmp_path)
    data = build("cifar10", tmp_path)
    assert (len(data.train), len(data.heldout or ()), data.classes) == (10, 2, 10)
    found = data.train[4]
    assert found["label"] == 4
    # The red value of row 2, column 5 is byte 2 * 32 + 5 of the first plane.
    np.testing.assert_array_equal(found["image"][2, 5], rows[4, 1 + 69 :: 1024])


def test_cifar_100_takes_the_fine_label(tmp_path: Path) -> None:
    rows = np.zeros((3, 3074), np.uint8)
    rows[:, 0], rows[:, 1] = 19, (99, 5, 7)
    for name in ("train.bin", "test.bin"):
        write(tmp_path / name, rows.tobytes())
    data = build("cifar100", tmp_path)
    assert take(data.train, np.arange(3))["label"].tolist() == [99, 5, 7]


def test_npz_archives_of_keras_and_of_medmnist(tmp_path: Path) -> None:
    image, label = PIXELS[..., 0], np.arange(12) % 3
    np.savez(tmp_path / "a.npz", x_train=image, y_train=label, x_test=image[:4], y_test=label[:4])
    np.savez(tmp_path / "b.npz", train_images=image, train_labels=label[:, None])
    first, second = (build("npz", tmp_path / name) for name in ("a.npz", "b.npz"))
    assert first.train[5]["image"].shape == (9, 8, 1)
    assert len(first.heldout or ()) == 4
    assert second.heldout is None
    np.testing.assert_array_equal(second.train[7]["image"], first.train[7]["image"])


def folder_of(tmp_path: Path, **changes: bytes) -> Path:
    for split, first in (("train", 0), ("val", 8)):
        for i in range(4 if split == "val" else 8):
            name = f"{split}/{('cat', 'dog')[i % 2]}/{i}.png"
            write(tmp_path / name, changes.pop(f"{split}{i}", encoded(PIXELS[first + i])))
    return tmp_path


def test_a_folder_of_classes_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    data = build("folder", folder_of(tmp_path))
    assert (len(data.train), len(data.heldout or ()), data.classes) == (8, 4, 2)
    found = take(data.train, np.array([0, 3, 4]))
    assert found["label"].tolist() == [0, 0, 1]
    np.testing.assert_array_equal(found["image"], PIXELS[[0, 6, 1]])
    assert take(data.train, np.array([], np.int64))["image"].shape == (0, 9, 8, 3)


def test_images_of_all_sizes_become_squares(tmp_path: Path) -> None:
    grey = Image.new("L", (40, 20), 200)
    file = io.BytesIO()
    grey.save(file, "JPEG")
    data = build("folder", folder_of(tmp_path, train2=file.getvalue()), size=6)
    image = take(data.train, np.arange(8))["image"]
    assert image.shape == (8, 6, 6, 3)
    assert abs(int(image[1].mean()) - 200) <= 2  # train2 is the second cat


def test_tars_of_the_webdataset_format_give_what_folders_give(tmp_path: Path) -> None:
    for split, first, count in (("train", 0, 8), ("val", 8, 4)):
        with tarfile.open(tmp_path / f"{split}-000.tar", "w") as tar:
            for i in range(count):
                pair = {"png": encoded(PIXELS[first + i]), "cls": str(i % 2).encode()}
                for suffix, content in pair.items():
                    member = tarfile.TarInfo(f"{i:04}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    data = build("tars", tmp_path)
    found = take(data.train, np.arange(8))
    np.testing.assert_array_equal(found["image"], PIXELS[:8])
    assert found["label"].tolist() == [0, 1] * 4
    assert len(data.heldout or ()) == 4
    whole = (tmp_path / "train-000.tar").read_bytes()
    # The header of the fourth image is cut off.
    write(tmp_path / "train-000.tar", whole[: 3 * 2048 + 100])
    with pytest.raises(DataError, match="truncated at byte 6,144, after 3 images: copy it again"):
        build("tars", tmp_path)


def test_broken_files_are_named_and_left_out_only_on_request(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, train3=encoded(PIXELS[3])[:60], train4=b"")
    data = build("folder", folder)
    message = r"train/cat/4.png is not an image .*\(neither JPEG nor PNG\).*skip_broken: true"
    with pytest.raises(DataError, match=message):
        take(data.train, np.arange(8))
    data = build("folder", folder, skip_broken=True)
    assert "2 broken files left out: " in data.description
    assert "dog/3.png" in data.description
    assert take(data.train, np.arange(6))["label"].tolist() == [0, 0, 0, 1, 1, 1]
    (folder / "val/dog").rename(folder / "dog")
    assert (
        "in 2 classes; without held-out images: dog; 2"
        in build("folder", folder, skip_broken=True).description
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "size",
            r"train/dog/3.png has 9 x 8 pixels, and .*0.png has 8 x 9: all images need",
        ),
        (
            "classes",
            "the held-out images have classes that the training images lack: fox; training has cat",
        ),
        ("one class", "all images to train on have the class cat, and a classifier needs two"),
        ("no train", "has val/ and no train/"),
        ("empty", "has no images: expected a folder for each class"),
        ("no folder", "is not a folder"),
        ("no tars", r"has no train\*.tar \(it holds: train, val\)"),
        ("label", r"0001 has the label '', expected a number in 0001.cls"),
        ("no tar", "is not a tar that can be read"),
        ("cifar", r"lacks data_batch_1.bin, .*cifar-10-binary.tar.gz"),
        ("cifar length", "damaged: it has 100 bytes, which is not a multiple of 3,073"),
        ("cifar label", r"test_batch.bin: example 1 has the label 11, expected 0 to 9"),
        ("npz", "cannot be read as npz"),
        ("npz pickled", "cannot be read as npz"),
        ("npz names", "holds a, expected x_train"),
        ("npz half", "has no labels for the split train"),
        ("npz dtype", "are float64, expected uint8"),
        ("npz labels", "labels are float64 from 0.0 to 1.0, expected integers"),
        ("npz large", r"labels are int64 from 1 to 1099511627776, expected integers"),
        (
            "npz heldout",
            "2 held-out images have labels that the training images lack, such as 12; .* 0 to 11",
        ),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, change: str, message: str) -> None:
    source = change.split()[0] if change.split()[0] in ("npz",) else "folder"
    path = tmp_path
    if change == "size":
        folder_of(tmp_path, train3=encoded(PIXELS[3].transpose(1, 0, 2)))
    elif change == "classes":
        write(folder_of(tmp_path) / "val/fox/1.png", encoded(PIXELS[0]))
    elif change == "one class":
        write(tmp_path / "train/cat/1.png", encoded(PIXELS[0]))
    elif change == "no train":
        write(tmp_path / "val/cat/1.png", encoded(PIXELS[0]))
    elif change == "no folder":
        path = tmp_path / "nowhere"
    elif change == "no tars":
        source = "tars"
        folder_of(tmp_path)
    elif change == "label":
        source = "tars"
        with tarfile.open(tmp_path / "train.tar", "w") as tar:
            member = tarfile.TarInfo("0001.png")
            tar.addfile(member, io.BytesIO())
    elif change == "no tar":
        source = "tars"
        write(tmp_path / "train.tar", b"no tar" * 1000)
    elif change.startswith("cifar"):
        source = "cifar10"
        if change != "cifar":
            cifar10(tmp_path, label=11)
        if change == "cifar length":
            write(tmp_path / "data_batch_3.bin", bytes(100))
    elif source == "npz":
        path = tmp_path / "x.npz"
        arrays: dict[str, Any] = {"x_train": PIXELS, "y_train": np.arange(12)}
        if change == "npz":
            write(path, b"no archive")
        elif change == "npz pickled":
            np.savez(path, x_train=np.array([{}], object), y_train=np.arange(1))
        else:
            arrays = {
                "npz names": {"a": PIXELS},
                "npz half": {"x_train": PIXELS},
                "npz dtype": {**arrays, "x_train": PIXELS.astype(float)},
                "npz labels": {**arrays, "y_train": np.linspace(0, 1, 12)},
                "npz large": {**arrays, "y_train": np.array([1] * 11 + [2**40])},
                "npz heldout": {**arrays, "x_test": PIXELS, "y_test": [*range(10), 12, 12]},
            }[change]
            np.savez(path, **arrays)
    with pytest.raises(DataError, match=message):
        take(build(source, path).train, np.arange(8))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "npz"}, "needs the setting directory, the path of the archive"),
        ({"source": "tars"}, "needs the setting directory, the folder of its files"),
        (
            {"source": "cifar10", "directory": "d", "size": 32},
            "size has an effect only with the sources 'folder'",
        ),
        (
            {"source": "digits", "skip_broken": True},
            "skip_broken has an effect only with the sources 'folder'",
        ),
    ],
)
def test_settings_without_an_effect_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImagesConfig(**settings)
