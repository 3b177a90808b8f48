"""Columns of Hugging Face data sets and of ArrayRecord files."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image

from jaxdist.config import Document, validate
from jaxdist.data import RecordsConfig
from jaxdist.data.records.example import parse_example
from jaxdist.data.source import Dataset, take
from jaxdist.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 9, 8, 3), dtype=np.uint8)


def build(format: str, directory: Path, **settings: Any) -> Dataset:
    values = {"type": "records", "format": format, "directory": str(directory), **settings}
    return validate(Document(values), RecordsConfig).build()


def encoded(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def varint(value: int) -> bytes:
    value %= 1 << 64
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(values: Mapping[str, Any]) -> bytes:
    """Write a `tf.train.Example`, as TensorFlow does."""
    entries = b""
    for key, value in values.items():
        if isinstance(value, bytes):
            feature = field(1, field(1, value))
        elif np.asarray(value).dtype.kind == "f":
            content = struct.pack(f"<{np.size(value)}f", *np.ravel(value))
            feature = field(2, field(1, content))
        else:
            feature = field(3, field(1, b"".join(varint(int(one)) for one in np.ravel(value))))
        entries += field(1, field(1, key.encode()) + field(2, feature))
    return field(1, entries)


def write(path: Path, records: Iterable[bytes]) -> None:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def rows(first: int, count: int, **changes: Any) -> list[dict[str, Any]]:
    found = [
        {"image": encoded(PIXELS[first + i]), "label": i % 3, "tokens": [i, 2**31 - 1, 7]}
        for i in range(count)
    ]
    for name, value in changes.items():
        found[3][name] = value
    return found


def folder(path: Path, **changes: Any) -> Path:
    """Write the files of TensorFlow Datasets."""
    train = [example(row) for row in rows(0, 8, **changes)]
    for i in range(2):
        write(path / f"own-train.array_record-0000{i}-of-00002", train[4 * i : 4 * i + 4])
    write(path / "own-test.array_record-00000-of-00001", map(example, rows(8, 4)))
    (path / "label.labels.txt").write_text("a\nb\nc\n")
    return path


def test_array_record_files_of_examples(tmp_path: Path) -> None:
    data = build("array_record", folder(tmp_path))
    assert (len(data.train), len(data.heldout or ()), data.classes) == (8, 4, 3)
    found = take(data.train, np.array([5, 0]))
    np.testing.assert_array_equal(found["image"], PIXELS[[5, 0]])
    assert found["label"].tolist() == [2, 0]
    assert found["tokens"].tolist() == [[5, 2**31 - 1, 7], [0, 2**31 - 1, 7]]
    assert take(data.train, np.array([], np.int64))["image"].shape == (0, 9, 8, 3)
    renamed = build("array_record", tmp_path, columns={"ids": "tokens"}, classes=5)
    assert (set(renamed.train[0]), renamed.classes) == ({"ids"}, 5)


def test_a_data_set_of_the_package_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["a", "b", "c"]),
            "tokens": datasets.List(datasets.Value("int64")),
        }
    )

    def split(first: int, count: int) -> Any:
        given = rows(first, count)
        columns = {key: [row[key] for row in given] for key in given[0]}
        columns["image"] = [{"bytes": content, "path": None} for content in columns["image"]]
        return datasets.Dataset.from_dict(columns, features=features)

    saved, hub, bare = (tmp_path / name for name in ("saved", "hub", "bare"))
    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": split(0, 8), "test": split(8, 4)}).save_to_disk(saved)
    split(0, 8).save_to_disk(bare)
    (hub / "data").mkdir(parents=True)
    split(0, 8).to_parquet(hub / "data/train-00000-of-00001.parquet")
    datasets.config.HF_DATASETS_CACHE = tmp_path / "cache"
    for path in (saved, hub, bare):
        data = build("huggingface", path)
        assert (len(data.train), data.classes) == (8, 3)
        assert len(data.heldout or ()) == (4 if path == saved else 0)
        found = take(data.train, np.array([5, 0]))
        np.testing.assert_array_equal(found["image"], PIXELS[[5, 0]])
        assert found["tokens"].tolist() == [[5, 2**31 - 1, 7], [0, 2**31 - 1, 7]]
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="cannot be read by the package datasets: "):
        build("huggingface", tmp_path / "nothing")


def test_the_package_datasets_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'jaxdist\[datasets\]'"):
        build("huggingface", tmp_path)


def test_broken_records_are_left_out_only_on_request(tmp_path: Path) -> None:
    folder(tmp_path, image=encoded(PIXELS[3])[:60])
    message = r"'image' of record 3 of .*, train is not an image .*skip_broken: true"
    with pytest.raises(DataError, match=message):
        take(build("array_record", tmp_path).train, np.arange(8))
    data = build("array_record", tmp_path, skip_broken=True)
    assert data.description.endswith(f"1 broken records left out: 3 of {tmp_path}, train")
    assert take(data.train, np.arange(7))["tokens"][:, 0].tolist() == [0, 1, 2, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("size", r"'image' of record 3 of .* is uint8 \(4, 8, 3\), and the first is .*data\.size"),
        (
            "text",
            r"'label' of record 3 of .*\(neither JPEG.*list the columns to read in data\.columns",
        ),
        (
            "columns",
            r"record 0 of .*, train has no column picture; choose from image, label, tokens",
        ),
        ("large", r"'tokens' of record 3 of .* holds 0 to 1099511627776, which 32 bits"),
        ("example", r"record 0 of .*, train is not a tf\.train\.Example"),
        ("damaged", r"the ArrayRecord files of train cannot be read: "),
        ("corrupt", r", train cannot be read, from record 0 of .*, train on: "),
        ("lacking", r"has 1 of 2 files of own-train.array_record-00000-of-00002: copy the missing"),
        ("no train", r"has no training split in format array_record \(it has: test\)"),
        ("no folder", "nowhere is not a folder"),
        ("all", r"all 4 records of .*, test are broken"),
    ],
)
def test_bad_records_are_told_with_their_place(tmp_path: Path, change: str, message: str) -> None:
    changes = {
        "size": {"image": encoded(PIXELS[3, :4])},
        "text": {"label": b"a cat"},
        "large": {"tokens": [0, 2**40, 7]},
    }
    folder(tmp_path, **changes.get(change, {}))
    first = tmp_path / "own-train.array_record-00000-of-00002"
    second = first.with_name("own-train.array_record-00001-of-00002")
    settings: dict[str, Any] = {}
    if change == "columns":
        settings = {"columns": {"image": "picture"}}
    elif change == "example":
        write(first, [b"\xff" * 40] * 4)
    elif change == "damaged":
        first.write_bytes(first.read_bytes()[:-70_000])
    elif change == "corrupt":
        content = bytearray(first.read_bytes())
        at = content.index(b"label")
        content[at : at + 9] = bytes(9)
        first.write_bytes(content)
    elif change in ("lacking", "no train"):
        second.unlink()
        if change == "no train":
            first.unlink()
    elif change == "all":
        settings = {"skip_broken": True}
        write(tmp_path / "own-test.array_record-00000-of-00001", [example({"image": b"no"})] * 4)
    path = tmp_path / "nowhere" if change == "no folder" else tmp_path
    with pytest.raises(DataError, match=message):
        take(build("array_record", path, **settings).train, np.arange(8))


def test_numbers_of_examples() -> None:
    values = {"a": [0, -1, 300, 2**62], "b": [0.5, -2.0], "c": b"text", "d": 3}
    found = parse_example(example(values), "r")
    assert found["a"].tolist() == values["a"]
    assert found["b"].tolist() == values["b"]
    assert found["c"] == [b"text"]
    assert found["d"].tolist() == [3]
    # A list may also have each number in a field of its own.
    single = field(1, field(1, field(1, b"e") + field(2, field(3, b"\x08\x05\x08\x06"))))
    assert parse_example(single, "r")["e"].tolist() == [5, 6]
    for end in range(1, len(single)):
        with pytest.raises(DataError, match="r is not a tf"):
            parse_example(single[:end], "r")
