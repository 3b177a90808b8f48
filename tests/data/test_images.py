from __future__ import annotations

import gzip
import hashlib
import io
import os
import struct
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from jaxdist.data.images import dataset as images
from jaxdist.data.images import fashion_mnist
from jaxdist.data.images.dataset import ImagesConfig
from jaxdist.data.images.fashion_mnist import SHA256, candidate_folders, find_folder
from jaxdist.data.images.idx import parse_idx, read_idx_content
from jaxdist.data.source import take
from jaxdist.errors import DataError


def _idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def _random(*shape: int, below: int = 256) -> np.ndarray:
    return np.random.default_rng(0).integers(below, size=shape).astype(np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, count in (("train", 30), ("t10k", 20)):
        images, labels = _random(count, 5, 4), np.arange(count) % 3
        (tmp_path / f"{split}-images-idx3-ubyte").write_bytes(_idx(images))
        (tmp_path / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(_idx(labels)))
    return tmp_path


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_idx_gives_the_array_back(shape: list[int]) -> None:
    array = _random(*shape)
    np.testing.assert_array_equal(parse_idx(_idx(array), "a"), array)


@given(st.binary(max_size=40), st.booleans())
def test_any_other_content_is_an_error_of_the_data(content: bytes, begin_well: bool) -> None:
    content = b"\0\0\x08" + content if begin_well else content
    try:
        array = parse_idx(content, "a")
    except DataError:
        return
    assert _idx(array) == content


@given(st.integers(1, 19))
def test_every_truncation_is_noticed(missing: int) -> None:
    with pytest.raises(DataError, match=r"truncated|not an IDX file"):
        parse_idx(_idx(_random(2, 2, 1))[:-missing], "a")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing"),
        (b"\x89PNG\r\n", "begins with 89 50 4e 47"),
        (b"\0\0\x0d\x01\0\0\0\0", "IDX dtype 0x0d, expected 0x08"),
        (b"\0\0\x08\0", "0 IDX dims, expected 1 to 4"),
        (b"\0\0\x08\x05", "5 IDX dims"),
        (b"\0\0\x08\x02\0\0\0\x01", "truncated: it has 8 bytes, but its header alone has 12"),
        (_idx(_random(3, 2))[:-1], "truncated: it holds 5 values, but its header says 3 x 2 = 6"),
        (_idx(_random(3)) + b"x", "too long: it holds 4 values, but its header says 3 = 3"),
    ],
)
def test_what_is_wrong_with_an_idx_file(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_idx(content, "a")


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone cannot be read: No such file"):
        read_idx_content(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe cannot be read: it is a pipe, not a regular file"):
        read_idx_content(tmp_path / "pipe")
    whole = gzip.compress(_idx(_random(900)))
    for number, damaged in enumerate([whole[:-20], b"not gzip", whole[:40] + b"?" + whole[41:]]):
        path = tmp_path / f"{number}.gz"
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{number}\.gz cannot be unpacked \({len(damaged)} b"):
            read_idx_content(path)


def test_idx_files_of_the_users_own(folder: Path) -> None:
    dataset = ImagesConfig(source="idx", directory=str(folder)).build()
    assert dataset.heldout is not None
    assert (len(dataset.train), len(dataset.heldout), dataset.classes) == (30, 20, 3)
    batch = take(dataset.train, np.array([7, 2]))
    assert (batch["image"].dtype, batch["label"].dtype) == (np.uint8, np.int32)
    np.testing.assert_array_equal(batch["image"][..., 0], _random(30, 5, 4)[[7, 2]])
    assert batch["label"].tolist() == [1, 2]
    assert "30 + 20 of 5 x 4 x 1 in 3 classes" in dataset.description


def test_a_held_out_split_is_optional_and_may_be_called_test(folder: Path) -> None:
    for path in folder.glob("t10k*"):
        path.rename(path.with_name(path.name.replace("t10k", "test")))
    config = ImagesConfig(source="idx", directory=str(folder))
    assert len(config.build().heldout or ()) == 20
    for path in folder.glob("test*"):
        path.unlink()
    assert config.build().heldout is None


def test_colour_images(tmp_path: Path) -> None:
    (tmp_path / "train-images").write_bytes(_idx(_random(3, 5, 4, 3)))
    (tmp_path / "train-labels").write_bytes(_idx(np.arange(3)))
    dataset = ImagesConfig(source="idx", directory=str(tmp_path)).build()
    assert dataset.train[0]["image"].shape == (5, 4, 3)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"has no train-images\* and train-labels\* \(it holds: nothing\)"),
        ({"train-images": _random(3, 2, 2)}, "train-images is only one of two required files"),
        (
            {"train-images": _random(3, 2, 2), "train-labels": _random(2)},
            r"images \(3, 2, 2\) and labels \(2,\) have shapes that do not fit",
        ),
        ({"train-images": _random(3, 2), "train-labels": _random(3)}, r"images \(3, 2\)"),
        ({"train-images": _random(0, 2, 2), "train-labels": _random(0)}, "has no images"),
        (
            {"train-images": _random(1, 2, 2), "train-images.2": _random(1), "train-labels": []},
            r"several files train-images\*: train-images, train-images\.2; keep only one",
        ),
        (
            {
                "train-images": _random(1, 2, 2),
                "train-labels": _random(1),
                "test-images": _random(1, 3, 2),
                "test-labels": _random(1),
            },
            r"held-out images differ in shape: \{.*\(3, 2, 1\)",
        ),
    ],
)
def test_contradictory_folders(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    for name, array in files.items():
        (tmp_path / name).write_bytes(_idx(np.asarray(array)))
    with pytest.raises(DataError, match=message):
        ImagesConfig(source="idx", directory=str(tmp_path)).build()


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere is not a folder"):
        ImagesConfig(source="idx", directory=str(tmp_path / "nowhere")).build()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "idx"}, "source 'idx' needs the setting directory"),
        (
            {"source": "digits", "directory": "d"},
            "directory 'd' has no effect with source 'digits'",
        ),
    ],
)
def test_contradictory_settings(settings: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ImagesConfig(**settings)


def test_digits_are_always_there() -> None:
    dataset = ImagesConfig(source="digits").build()
    assert dataset.heldout is not None
    assert (len(dataset.train), len(dataset.heldout), dataset.classes) == (1438, 359, 10)
    everything = take(dataset.train, np.arange(1438))
    assert everything["image"].shape == (1438, 8, 8, 1)
    assert (everything["image"].min(), everything["image"].max()) == (0, 255)
    heldout = take(dataset.heldout, np.arange(359))
    assert np.bincount(heldout["label"], minlength=10).min() > 20
    assert heldout["label"][:6].tolist() == [9, 4, 7, 0, 2, 6]


@pytest.mark.full
def test_digits_are_scikit_learn_s() -> None:
    from sklearn.datasets import load_digits

    table, bunch = images._digits_table(), load_digits()
    np.testing.assert_array_equal(table[:, :-1], bunch.data)
    np.testing.assert_array_equal(table[:, -1], bunch.target)


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"needs scikit-learn: pip install 'jaxdist\[images\]'"):
        ImagesConfig(source="digits").build()


@pytest.mark.parametrize("content", [None, b"1,2,3", b"1,2,x"])
def test_digits_of_a_damaged_scikit_learn(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModuleSpec("sklearn", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(images.importlib.util, "find_spec", lambda name: spec)
    if content is not None:
        folder = tmp_path / "datasets" / "data"
        folder.mkdir(parents=True)
        (folder / "digits.csv.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=r"pip install --force-reinstall scikit-learn"):
        ImagesConfig(source="digits").build()


@pytest.mark.full
def test_fashion_mnist_in_full() -> None:
    if find_folder(candidate_folders(os.environ)) is None:
        pytest.skip("Fashion-MNIST is not on this machine (Debian: dataset-fashion-mnist)")
    dataset = ImagesConfig(source="fashion-mnist").build()
    assert dataset.heldout is not None
    assert (len(dataset.train), len(dataset.heldout), dataset.classes) == (60_000, 10_000, 10)
    labels = take(dataset.train, np.arange(60_000))["label"]
    assert np.bincount(labels).tolist() == [6000] * 10


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A Fashion-MNIST of three images, published under checksums of its own, and not found here."""
    files = {name: _idx(_random(3, 2, 2) if "images" in name else np.arange(3)) for name in SHA256}
    for name, content in files.items():
        monkeypatch.setitem(SHA256, name, hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(
        fashion_mnist,
        "candidate_folders",
        lambda environ: iter([Path(environ["JAXDIST_CACHE"]) / "fashion-mnist"]),
    )
    return files


def test_fashion_mnist_is_downloaded_once(
    published: dict[str, bytes], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answer(url: str, timeout: float) -> io.BytesIO:
        asked.append(url.removeprefix(fashion_mnist.HOME))
        return io.BytesIO(gzip.compress(published[asked[-1].removesuffix(".gz")]))

    monkeypatch.setattr("urllib.request.urlopen", answer)
    (own_cache / "fashion-mnist").mkdir()
    by_hand = "t10k-images-idx3-ubyte"
    (own_cache / "fashion-mnist" / by_hand).write_bytes(published[by_hand])
    datasets = [ImagesConfig(source="fashion-mnist").build() for _ in range(2)]
    assert datasets[1].train[0]["image"].shape == (2, 2, 1)
    assert sorted(asked) == sorted(f"{name}.gz" for name in SHA256 if name != by_hand)


def test_a_download_of_something_else_is_not_kept(
    published: dict[str, bytes], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "urllib.request.urlopen", lambda url, timeout: io.BytesIO(gzip.compress(b"a portal"))
    )
    digest = hashlib.sha256(b"a portal").hexdigest()
    with pytest.raises(DataError, match=f"is not the published .*{digest}"):
        ImagesConfig(source="fashion-mnist").build()
    assert list((own_cache / "fashion-mnist").iterdir()) == []


def test_a_changed_file_is_noticed(published: dict[str, bytes], own_cache: Path) -> None:
    (own_cache / "fashion-mnist").mkdir()
    for name, content in published.items():
        (own_cache / "fashion-mnist" / name).write_bytes(content)
    assert len(ImagesConfig(source="fashion-mnist").build().train) == 3
    changed = published["train-images-idx3-ubyte"][:-1] + b"\0"
    (own_cache / "fashion-mnist" / "train-images-idx3-ubyte").write_bytes(changed)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte is not the published"):
        ImagesConfig(source="fashion-mnist").build()


def test_offline_names_every_way_out(
    published: dict[str, bytes], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(url: str, timeout: float) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("urllib.request.urlopen", fail)
    with pytest.raises(DataError) as caught:
        ImagesConfig(source="fashion-mnist").build()
    for part in (
        "Name or service not known",
        "dataset-fashion-mnist",
        str(own_cache / "fashion-mnist"),
        "train-images-idx3-ubyte.gz",
        "source: digits",
    ):
        assert part in str(caught.value)


def test_where_fashion_mnist_is_looked_for(tmp_path: Path) -> None:
    environ = {"XDG_DATA_HOME": "/h", "XDG_DATA_DIRS": "/a:/b", "JAXDIST_CACHE": "/c"}
    folders = [folder.as_posix() for folder in candidate_folders(environ)]
    assert f"{Path(sys.prefix).as_posix()}/share/datasets/fashion-mnist" == folders[0]
    assert folders[-4:] == [
        "/h/datasets/fashion-mnist",
        "/a/datasets/fashion-mnist",
        "/b/datasets/fashion-mnist",
        "/c/fashion-mnist",
    ]
    assert "/usr/share/datasets/fashion-mnist" in folders
    assert find_folder(iter([tmp_path])) is None
