"""Labelled text: what an example holds, how documents are split, and malformed data."""

import json

import numpy as np
import pytest
from pydantic import ValidationError

from jaxdist.data.text.labelled import LabelledTextConfig
from jaxdist.errors import DataError


def config(**settings):
    given = {"type": "labelled_text", "heldout_fraction": 0.3, **settings}
    return LabelledTextConfig.model_validate_json(json.dumps(given))


def rows_file(folder, count=40, **more):
    lines = [{"text": f"line {i}", "label": ("good", "bad")[i % 2], **more} for i in range(count)]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_rows_are_sequences_with_the_class_of_their_label(tmp_path):
    found = config(files=rows_file(tmp_path), window=12).build()
    assert (found.classes, found.vocab_size) == (2, 257)
    assert len(found.train) + len(found.heldout) == 40
    seen = set()
    for split in (found.train, found.heldout):
        for i in range(len(split)):
            example = split[i]
            tokens, segments = example["tokens"], example["segments"]
            text = bytes(tokens[segments == 1][1:].astype(np.uint8)).decode()
            assert tokens[0] == 256
            assert (tokens[segments == 0] == 256).all()
            # Classes are numbered by name: bad 0, good 1.
            assert example["label"] == 1 - int(text.split()[1]) % 2
            seen.add(text)
    assert seen == {f"line {i}" for i in range(40)}
    assert "40" not in found.description or "documents" in found.description


def test_a_file_has_the_class_of_its_folder_or_of_the_first_pattern(tmp_path):
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        for i in range(12):
            (tmp_path / name / f"{i}.txt").write_text(f"{name[0] * 5}{i:02}" * 3)
    given = {"files": str(tmp_path / "*/*.txt"), "window": 8}
    found = config(**given).build()
    # 21 bytes are three pieces of 7, each with a token before it.
    assert len(found.train) + len(found.heldout) == 3 * 24
    for split in (found.train, found.heldout):
        rows = split.take(np.arange(len(split)))
        pieces = rows["tokens"][:, 1]
        np.testing.assert_array_equal(rows["label"], pieces == ord("d"))
    first = config(**given, pieces=1, classes={"one": ["*/1*.txt"], "rest": ["*"]}).build()
    assert len(first.train) + len(first.heldout) == 24
    labels = [
        split[i]["label"] for split in (first.train, first.heldout) for i in range(len(split))
    ]
    assert labels.count(0) == 2 * 3


@pytest.mark.parametrize(
    ("content", "settings", "words"),
    [
        ('{"text": "a"}', {}, r"rows.jsonl:1 needs a text in 'text' and a class .*data\.label_f"),
        ('{"text": "a", "label": 1.5}', {}, "a text or a whole number"),
        ("{", {}, r"rows.jsonl:1 is not JSON"),
        ('{"text": "a", "label": "x"}', {}, r"classes \['x'\], but a classifier needs two"),
        ('{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}', {},
         r"split has no document of the class .*change data\.heldout_fraction \(0\.3\)"),
    ],
)  # fmt: skip
def test_malformed_rows_are_told_with_their_place(tmp_path, content, settings, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=words):
        config(files=str(path), **settings).build()


def test_a_file_without_a_class_is_told(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match=r"data\.classes: no pattern matches a\.txt"):
        config(files=str(tmp_path / "a.txt"), classes={"x": ["b*"]}).build()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"source": "files"}, r"source 'files' needs data\.files: a glob such as"),
        ({}, r"python-stdlib needs data.classes, such as \{tests: \[test/\*\]"),
    ],
)
def test_settings_that_contradict_are_refused(settings, words):
    with pytest.raises(ValidationError, match=words):
        config(**settings)
