from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.data.text.documents import TextFile, matching, python_stdlib, split_documents
from jaxdist.errors import DataError


def _write(folder: Path, **files: str | bytes) -> list[TextFile]:
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / f"{name}.txt").write_bytes(data)
    return matching([str(folder / "*.txt")])


def test_the_standard_library_is_python_source_of_its_own() -> None:
    files = python_stdlib()
    names = [file.name for file in files]
    assert "json/decoder.py" in names
    assert names == sorted(set(names))
    assert all(name.endswith(".py") and "-packages" not in name for name in names)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    files = _write(tmp_path, a=b"\xef\xbb\xbfone", b="one", c="two\ufeffthree")
    split = split_documents(files, heldout_fraction=0.0)
    # What is equal but for the mark counts once; within a document the character is text.
    assert split.train == [b"one", "two\ufeffthree".encode()]
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "four"}\n')
    lines = split_documents(matching([str(tmp_path / "*.jsonl")]), heldout_fraction=0.0)
    assert lines.train == [b"four"]


def test_globs_go_into_subfolders_and_count_a_file_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/x.txt", "a/b/y.md", "a/b/z.py"):
        (tmp_path / name).write_text(name)
    found = matching([str(tmp_path / "a" / "**" / "*"), str(tmp_path / "a" / "x.txt")])
    assert [file.name for file in found] == ["b/y.md", "b/z.py", "x.txt"]


def test_equal_names_below_different_folders_stay_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(folder)
    found = matching([str(tmp_path / "a" / "*"), str(tmp_path / "b" / "*")])
    assert [file.name for file in found] == ["x.txt", "x.txt#2"]
    split = split_documents(found, heldout_fraction=0.5)
    assert len(split.train) == len(split.heldout) == 1


def test_a_glob_without_files_names_the_nearest_folder(tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").touch()
    with pytest.raises(DataError) as caught:
        matching([str(tmp_path / "books" / "poems" / "*.txt")])
    for part in ("books/poems/*.txt' matches no file", str(tmp_path / "books"), "one.txt"):
        assert part in str(caught.value)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "photo.png").touch()
    with pytest.raises(DataError, match=r"photo\.png.*'\.png', expected one of \.txt"):
        matching([str(tmp_path / "*")])


def test_equal_and_empty_files_are_dropped(tmp_path: Path) -> None:
    files = _write(tmp_path, a="same", b="same", c="", d="other")
    split = split_documents(files, heldout_fraction=0)
    assert split.train == [b"same", b"other"]
    assert split.heldout == []
    assert (split.facts["files"], split.facts["skipped_files"]) == (2, 2)


@given(
    names=st.sets(st.text("abcxyz", min_size=1, max_size=6), min_size=2, max_size=12),
    fraction=st.floats(0.01, 0.99),
)
def test_each_file_is_on_one_side_and_no_side_is_empty(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], fraction: float
) -> None:
    files = _write(tmp_path_factory.mktemp("split"), **{name: name for name in names})
    split = split_documents(files, heldout_fraction=fraction)
    assert sorted(split.train + split.heldout) == sorted(name.encode() for name in names)
    assert split.train
    assert split.heldout


def test_a_side_does_not_depend_on_the_other_files(tmp_path: Path) -> None:
    few = _write(tmp_path, **{f"n{i}": f"{i}" for i in range(100)})
    before = set(split_documents(few, heldout_fraction=0.2).heldout)
    more = _write(tmp_path, **{f"n{i}": f"{i}" for i in range(200)})
    after = set(split_documents(more, heldout_fraction=0.2).heldout)
    assert 5 < len(before) < 40
    assert before == {document for document in after if int(document) < 100}


@pytest.mark.full
def test_the_split_is_the_same_in_every_process(tmp_path: Path) -> None:
    files = _write(tmp_path, **{f"n{i}": f"{i}" for i in range(20)})
    code = (
        "from jaxdist.data.text.documents import *; import sys; print(split_documents("
        "matching([sys.argv[1]]), heldout_fraction=0.3).heldout)"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "*.txt")],
        env=os.environ | {"PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert other.stdout.strip() == str(split_documents(files, heldout_fraction=0.3).heldout)


def test_a_single_file_is_cut_between_lines(tmp_path: Path) -> None:
    split = split_documents(_write(tmp_path, a="0123\n" * 10), heldout_fraction=0.25)
    assert split.train == [b"0123\n" * 8]
    assert split.heldout == [b"0123\n" * 2]


def test_a_single_line_is_cut_between_characters(tmp_path: Path) -> None:
    split = split_documents(_write(tmp_path, a="äöü" * 9), heldout_fraction=0.5)
    assert (split.train[0] + split.heldout[0]).decode() == "äöü" * 9
    assert split.train[0].decode()
    assert split.heldout[0].decode()


def test_each_line_of_jsonl_is_a_document(tmp_path: Path) -> None:
    lines = [json.dumps({"body": f"line {i}\nä"}) for i in range(10)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:5]) + "\n\n" + "\n".join(lines[5:]))
    files = matching([str(tmp_path / "*.jsonl")])
    split = split_documents(files, heldout_fraction=0.2, jsonl_field="body")
    assert split.train == [f"line {i}\nä".encode() for i in range(8)]
    assert split.heldout == [f"line {i}\nä".encode() for i in (8, 9)]
    assert split.facts["documents"] == 10


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"a\.jsonl:2 is not JSON"),
        ('{"txt": "a"}', r"a\.jsonl:2 has no text in 'text' \(found: \['txt'\]\)"),
        ('{"text": 3}', r"a\.jsonl:2 has no text in 'text'"),
        ("[" * 100_000, r"a\.jsonl:2 is not JSON: it is nested too deeply"),
        (
            r'{"text": "so \ud83d"}',
            r"a\.jsonl:2 has .*ud83d.* at index 3 of 'text', half of a surrogate pair",
        ),
        ("[1]", r"a\.jsonl:2 has no text in 'text' \(found: list\)"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        split_documents(matching([str(tmp_path / "*")]), heldout_fraction=0)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    files = _write(tmp_path, a="fine", b=b"caf\xe9")  # codespell:ignore caf
    with pytest.raises(DataError, match=r"b\.txt is not UTF-8: .* at byte 3"):
        split_documents(files, heldout_fraction=0)
    assert split_documents(files, heldout_fraction=0, not_utf8="skip").train == [b"fine"]
    assert len(split_documents(files, heldout_fraction=0, not_utf8="keep").train) == 2


def test_a_pipe_and_a_directory_are_no_text(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone.txt")
    for name, message in (
        ("pipe", "is a pipe, not a regular file"),
        (
            "folder",
            r"is a directory, not a regular file; name the files in the dir.*folder\.txt/\*",
        ),
        ("link", "cannot be read: No such file"),
    ):
        with pytest.raises(DataError, match=rf"matches no file; .*{name}\.txt {message}"):
            matching([str(tmp_path / f"{name}*")])
    pipe = TextFile(tmp_path / "pipe.txt", "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt cannot be read: it is a pipe, not a regular"):
        split_documents([pipe], heldout_fraction=0)


def test_a_file_name_may_be_any_bytes(tmp_path: Path) -> None:
    for name in (b"caf\xe9.txt", b"b.txt"):  # codespell:ignore caf
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text(str(len(name)))
    split = split_documents(matching([str(tmp_path / "*")]), heldout_fraction=0.5)
    assert len(split.train) == len(split.heldout) == 1


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt cannot be read: No such file"):
        split_documents([TextFile(tmp_path / "gone.txt", "gone.txt")], heldout_fraction=0)
