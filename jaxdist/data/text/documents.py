"""Text files as documents: the files, their splits, and the documents in each file."""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from jaxdist.config.files import path_kind, read_regular
from jaxdist.errors import DataError, os_errors_as

SUFFIXES = (".txt", ".md", ".py", ".jsonl")

NotUtf8 = Literal["keep", "skip", "raise"]

_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


class TextFile(NamedTuple):
    """A file, and its name relative to the requested folder; the name is equal on all machines."""

    path: Path
    name: str


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
        if not content or digest in seen or not _usable(file.path, content, not_utf8):
            continue
        seen.add(digest)
        documents = (
            list(_jsonl(file.path, content, jsonl_field))
            if file.path.suffix == ".jsonl"
            else [content]
        )
        kept.append((_uniform(file.name), documents))
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


def _uniform(name: str) -> float:
    """Return a number in [0, 1) that depends only on the name."""
    # A float64 holds 48 bits exactly.
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=6).digest()) / 2**48


def read_text_file(path: Path) -> bytes:
    """Return the content of a file, without a UTF-8 byte order mark.

    Raises:
      DataError: the file cannot be read.
    """
    with os_errors_as(DataError, f"data: {path} cannot be read"):
        # The byte order mark belongs to the encoding of the file, and not to the text.
        return read_regular(path).removeprefix(codecs.BOM_UTF8)


def _usable(path: Path, content: bytes, not_utf8: NotUtf8) -> bool:
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


def _jsonl(path: Path, content: bytes, field: str) -> Iterator[bytes]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"data: {path}:{number} is not JSON: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            keys = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise DataError(
                f"data: {path}:{number} has no text in {field!r} (found: {keys}); name the field "
                "with data.jsonl_field"
            )
        try:
            yield record[field].encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise DataError(
                f"data: {path}:{number} has {half} at index {error.start} of {field!r}, "
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
