"""Text files as documents: the files, their splits, and the documents in each file."""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from jaxdist.config.files import parse_json, path_kind, read_regular
from jaxdist.config.schema import Config
from jaxdist.errors import DataError, os_errors_as
from jaxdist.types import Json

SUFFIXES = (".txt", ".md", ".py", ".jsonl")

NotUtf8 = Literal["keep", "skip", "raise"]

_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


class TextFile(NamedTuple):
    """A file, and its name relative to the requested folder; the name is equal on all machines."""

    path: Path
    name: str


class TextFilesConfig(Config):
    """The files of text data."""

    source: Literal["python-stdlib", "files"] = "python-stdlib"
    """The origin of the text. `python-stdlib` reads the Python files of the running interpreter's
    standard library. `files` reads the files that the key `files` names, and need not be written if
    that key is set."""
    files: list[str] = Field(default=[])
    """The glob patterns of the files, such as `books/**/*.txt`, relative to the current directory.
    """

    @model_validator(mode="before")
    @classmethod
    def _files_imply_their_source(cls, values: Json) -> Json:
        if isinstance(values, dict) and values.get("files") == [] and "source" not in values:
            raise ValueError("data.files is empty: name a file or a glob, or leave data.files out")
        if isinstance(values, dict) and values.get("files"):
            files = values["files"]
            files = [files] if isinstance(files, str) else files
            return {"source": "files", **values, "files": files}
        return values

    @field_validator("source", mode="before")
    @classmethod
    def _no_file(cls, source: Json) -> Json:
        if isinstance(source, str) and source not in ("python-stdlib", "files"):
            raise ValueError(
                f"unknown source {source!r}: the only built-in source is python-stdlib; to train "
                "on your own text, name its files in data.files"
            )
        return source

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.source == "files" and not self.files:
            raise ValueError("source 'files' needs data.files: a glob such as 'books/**/*.txt'")
        if self.source != "files" and self.files:
            raise ValueError(
                f"files {self.files} have no effect with source {self.source!r}: leave out "
                "data.source, or data.files"
            )
        return self

    def listed(self) -> list[TextFile]:
        """List the files of the text, sorted by name.

        Raises:
          DataError: a pattern matches no text file.
        """
        return matching(self.files) if self.source == "files" else python_stdlib()


class SplitDocuments(NamedTuple):
    """The documents of both splits as bytes, and the numbers of files and documents."""

    train: list[bytes]
    heldout: list[bytes]
    facts: dict[str, int]


def python_stdlib() -> list[TextFile]:
    """List the Python files of the running interpreter's standard library, sorted by name.

    Installed packages (site-packages) are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, subfolders, names in os.walk(root):
        # The list is changed in place: `os.walk` descends into the folders that remain in it.
        subfolders[:] = [name for name in subfolders if name not in _NOT_STDLIB]
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        files += [
            TextFile(path, path.relative_to(root).as_posix()) for path in paths if path.is_file()
        ]
    return sorted(files, key=lambda file: file.name)


def matching(patterns: Sequence[str]) -> list[TextFile]:
    """List, sorted by name, the files that any glob matches (`**` descends into subfolders).

    Raises:
      DataError: a glob matches no file, or a file does not have a suffix of text files.
    """
    found: dict[Path, TextFile] = {}
    for pattern in patterns:
        root = _fixed_folder(pattern)
        paths = [Path(p) for p in glob.glob(os.path.expanduser(pattern), recursive=True)]
        files = [path for path in paths if path.is_file()]
        if not files:
            raise DataError(f"data.files: {pattern!r} matches no file; {_instead(paths, root)}")
        for path in files:
            if path.suffix not in SUFFIXES:
                raise DataError(
                    f"data.files: {path} (from {pattern!r}) has the suffix {path.suffix!r}, "
                    f"expected one of {', '.join(SUFFIXES)}; use a narrower pattern"
                )
            name = path.relative_to(root).as_posix()
            # Two globs may match the same file, perhaps by a link; such a file counts once.
            found.setdefault(path.resolve(), TextFile(path, name))
    return _distinct(sorted(found.values(), key=lambda file: (file.name, file.path)))


def split_documents(
    files: Sequence[TextFile],
    *,
    heldout_fraction: float,
    jsonl_field: str = "text",
    not_utf8: NotUtf8 = "raise",
) -> SplitDocuments:
    """Read every file once, leave out empty files and copies of other files, and split the files.

    A UTF-8 byte order mark at the start of a file is removed.

    The hash of a file's name decides whether the file is held out, independently of other files. If
    there are several files, each split has at least one of them. A single file is cut, and its last
    part is held out. A .jsonl file is cut between two documents, and any other file between two
    lines.

    Args:
      files: the files, sorted, with distinct names.
      heldout_fraction: the expected fraction of the held-out split, in [0, 1); 0 holds nothing out.
      jsonl_field: the key of the text in each line of a .jsonl file.
      not_utf8: the treatment of a file that is not UTF-8.

    Raises:
      DataError: a file cannot be read or, with "raise", is not UTF-8; a line of a .jsonl file is
        malformed.
    """
    seen: set[bytes] = set()
    kept: list[tuple[float, list[bytes]]] = []
    for file in files:
        content = read_text_file(file.path)
        digest = hashlib.blake2b(content, digest_size=16).digest()
        # Files with equal content count once: with copies in both splits, the model would have
        # trained on held-out text.
        if not content or digest in seen or not is_usable(file.path, content, not_utf8):
            continue
        seen.add(digest)
        documents = (
            list(_jsonl(file.path, content, jsonl_field))
            if file.path.suffix == ".jsonl"
            else [content]
        )
        kept.append((hashed_share(os.fsencode(file.name)), documents))
    train, heldout = _divide(kept, heldout_fraction)
    facts = {
        "files": len(kept),
        "skipped_files": len(files) - len(kept),
        "documents": len(train) + len(heldout),
        "train_bytes": sum(map(len, train)),
        "heldout_bytes": sum(map(len, heldout)),
    }
    return SplitDocuments(train, heldout, facts)


def _divide(
    kept: Sequence[tuple[float, list[bytes]]], fraction: float
) -> tuple[list[bytes], list[bytes]]:
    if fraction == 0 or not kept:
        return [document for _, documents in kept for document in documents], []
    if len(kept) == 1:
        return _cut(kept[0][1], fraction)
    draws = sorted(draw for draw, _ in kept)
    # The file with the smallest draw is always held out, and the file with the largest draw is
    # always in the training split.
    threshold = min(max(fraction, draws[0]), draws[-2])
    train = [document for draw, some in kept if draw > threshold for document in some]
    heldout = [document for draw, some in kept if draw <= threshold for document in some]
    return train, heldout


def _cut(documents: list[bytes], fraction: float) -> tuple[list[bytes], list[bytes]]:
    if len(documents) == 1:
        content = documents[0]
        start = int(len(content) * (1 - fraction))
        place = content.find(b"\n", start) + 1
        if place in (0, len(content)):
            place = start
            # The bytes 10xxxxxx continue a character of UTF-8, which must not be cut.
            while place < len(content) and content[place] & 0xC0 == 0x80:
                place += 1
        return [content[:place]], [content[place:]]
    remaining = sum(map(len, documents)) * (1 - fraction)
    count = 0
    while count < len(documents) - 1 and (remaining > 0 or count == 0):
        remaining -= len(documents[count])
        count += 1
    return documents[:count], documents[count:]


def hashed_share(content: bytes) -> float:
    """Return a number in [0, 1) that depends only on the content, to divide data into splits."""
    # A float64 holds 48 bits exactly.
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest()) / 2**48


def read_text_file(path: Path) -> bytes:
    """Return the content of a file, without a UTF-8 byte order mark.

    Raises:
      DataError: the file cannot be read.
    """
    with os_errors_as(DataError, f"data: {path} cannot be read"):
        # The byte order mark belongs to the encoding of the file, and not to the text.
        return read_regular(path).removeprefix(codecs.BOM_UTF8)


def is_usable(path: Path, content: bytes, not_utf8: NotUtf8) -> bool:
    """Return whether a file may be used: its content is UTF-8, or `not_utf8` is keep.

    Raises:
      DataError: the content is not UTF-8, and `not_utf8` is raise.
    """
    if not_utf8 == "keep":
        return True
    try:
        content.decode()
    except UnicodeDecodeError as error:
        if not_utf8 == "skip":
            return False
        raise DataError(
            f"data: {path} is not UTF-8: {error.reason} at byte {error.start}; convert the file to "
            "UTF-8, or use tokenizer: {type: bytes}, which accepts any content"
        ) from error
    return True


def json_rows(path: Path, content: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the location PATH:LINE and the JSON value of each line that is not empty.

    Raises:
      DataError: a line is not JSON.
    """
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                row = parse_json(line)
            except ValueError as error:
                raise DataError(f"data: {path}:{number} is not JSON: {error}") from error
            yield f"{path}:{number}", row


def keys_found(row: Any) -> object:
    """Return the keys of a mapping, or the name of the type of another value, for errors."""
    return sorted(row) if isinstance(row, dict) else type(row).__name__


def _jsonl(path: Path, content: bytes, field: str) -> Iterator[bytes]:
    for place, row in json_rows(path, content):
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            raise DataError(
                f"data: {place} has no text in {field!r} (found: {keys_found(row)}); name the "
                "field with data.jsonl_field"
            )
        try:
            yield row[field].encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise DataError(
                f"data: {place} has {half} at index {error.start} of {field!r}, "
                "half of a surrogate pair that UTF-8 cannot encode: correct the line, or leave it "
                "out"
            ) from error


def _distinct(files: Sequence[TextFile]) -> list[TextFile]:
    """Return files with distinct names: a number is appended to a name that is already taken."""
    counts: dict[str, int] = {}
    named = []
    for path, name in files:
        counts[name] = counts.get(name, 0) + 1
        named.append(TextFile(path, name if counts[name] == 1 else f"{name}#{counts[name]}"))
    return named


def _fixed_folder(pattern: str) -> Path:
    """Return the folder above the first wildcard of a glob."""
    parts = Path(os.path.expanduser(pattern)).parts[:-1]
    fixed = 0
    while fixed < len(parts) and not glob.has_magic(parts[fixed]):
        fixed += 1
    return Path(*parts[:fixed])


def _instead(paths: Sequence[Path], root: Path) -> str:
    """Describe the existing files and folders near a glob that matched no regular file."""
    for path in paths:
        try:
            kind = path_kind(path)
        except OSError as error:  # The path is a link whose target does not exist.
            return f"{path} cannot be read: {error.strerror}"
        remedy = f"; name the files in the directory: {path}/*.txt" if path.is_dir() else ""
        return f"{path} is {kind}, not a regular file{remedy}"
    return _nearest(root)


def _nearest(folder: Path) -> str:
    while not folder.is_dir():
        folder = folder.parent
    names = sorted(path.name for path in folder.iterdir())
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"the nearest folder that exists is {folder.resolve()} (it holds: {shown or 'nothing'})"
