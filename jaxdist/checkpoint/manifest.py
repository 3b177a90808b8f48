"""The manifest of a checkpoint: the size and digest of every file, and a digest of the manifest.

Orbax loads an array with a flipped bit without an error. Therefore jaxdist computes digests of all
files. A checkpoint is valid if its manifest has exactly the bytes that `seal` wrote and every file
matches the manifest.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import jax
from pydantic import AfterValidator, Field

from jaxdist.checkpoint.layout import MANIFEST, fsync_directory
from jaxdist.config.files import path_kind, read_regular
from jaxdist.config.schema import Config
from jaxdist.errors import some_of

DIGEST_BYTES = 32
_LISTED_PROBLEMS = 5


class DamageError(Exception):
    """The error for damaged files of a checkpoint; the text names the file and the problem."""


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts:
        raise ValueError(f"{name!r} is not a path inside the checkpoint")
    return name


class FileRecord(Config):
    """The size and the digest that a file had when the checkpoint was sealed."""

    bytes: int = Field(ge=0)
    """The length of the file, in bytes."""
    blake2b: str = Field(pattern=r"^[0-9a-f]{64}$")
    """The 256-bit BLAKE2b digest of the file's content, in hexadecimal."""


class LeafRecord(Config):
    """The record of an array of the saved tree."""

    shape: tuple[int, ...]
    """The global shape, without the zeros with which the array may be padded on disk."""
    dtype: str
    """The name of the dtype, such as 'bfloat16' or 'key<fry>'."""
    key_impl: str | None = None
    """The generator of an array of random keys, or None for any other array."""


Cuts = tuple[tuple[int, ...], ...]
"""For each dim of an array: the starts of its chunks in ascending order, followed by the length of
the dim."""


class Manifest(Config):
    """The content of a manifest; `leaves` lists the arrays in the order of their numbers."""

    format: Literal[1, 2, 3, 4] = 2
    """The version of this format. In version 1, parameters of ZeRO 3 may be in a wrong order; see
    `jaxdist.run.loading.misordered`. The field `cuts` exists since version 3, and `generation`
    since version 4.
    """
    jax: str = jax.__version__
    """The version of jax that wrote the checkpoint."""
    step: int = Field(ge=0)
    """The step of the saved state."""
    generation: int | None = None
    """The generation that wrote the checkpoint, or None for a run on a single host."""
    metric: float | None
    """The metric for `keep_best`, or None if the state had no finite metric."""
    leaves: dict[str, LeafRecord]
    """The records of the arrays, by tree path."""
    cuts: dict[str, Cuts] = Field(default_factory=dict)
    """For each array that is stored in separate files, by tree path, the positions at which it is
    divided into these files; see `pieces`."""
    files: dict[Annotated[str, AfterValidator(_inside)], FileRecord]
    """The records of all files except the manifest, by path inside the checkpoint."""


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def _wrap(body: bytes) -> bytes:
    return b'{"blake2b":"%s","manifest":%s}\n' % (_digest(body).encode(), body)


_HEAD_BYTES = _wrap(b"").index(b":}") + 1
_TAIL_BYTES = len(b"}\n")


def record_of(path: Path, *, durable: bool = False) -> FileRecord:
    """Return the size and digest of a file.

    Args:
      durable: whether to also write the file to disk, so that it survives a power failure.

    Raises:
      OSError: the path is not a regular file, or the file cannot be read.
    """
    kind = path_kind(path)
    if kind is not None:  # A read could block on a pipe, or never end on a device file.
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES))
        if durable:
            # Other code has written the file. On Linux, an fsync writes all cached content of a
            # file to disk, even through a descriptor that can only read.
            os.fsync(file.fileno())
        return FileRecord(bytes=file.tell(), blake2b=digest.hexdigest())


def seal(
    directory: Path,
    *,
    step: int,
    metric: float | None,
    leaves: dict[str, LeafRecord],
    cuts: dict[str, Cuts] | None = None,
    known: Mapping[str, FileRecord] | None = None,
    generation: int | None = None,
) -> Manifest:
    """Write and return the manifest of a checkpoint, with the digests of all files.

    Before that, each file is synced to disk. Every file that is not in `known` is read, usually
    from the page cache.

    Args:
      cuts, generation: see `Manifest`.
      known: the records, by path inside the checkpoint, of the files whose digests were computed
        before the files were written, or None if there are no such files.

    Raises:
      OSError: a file cannot be read or the manifest cannot be written.
    """
    known = known or {}

    def record(name: str) -> FileRecord:
        if name not in known:
            return record_of(directory / name, durable=True)
        with (directory / name).open("rb") as file:
            os.fsync(file.fileno())
        return known[name]

    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    names = [path.relative_to(directory).as_posix() for path in paths]
    with ThreadPoolExecutor() as pool:
        files = dict(zip(names, pool.map(record, names), strict=True))
    # The manifest gets the lowest format that can describe the content. Earlier versions of jaxdist
    # can then still read a checkpoint that has no cut arrays or no generation.
    more: Any = {"format": 3, "cuts": cuts} if cuts else {}
    if generation is not None:
        more |= {"format": 4, "generation": generation}
    manifest = Manifest(step=step, metric=metric, leaves=leaves, files=files, **more)
    left_out = {"cuts": cuts, "generation": generation is not None}
    body = manifest.model_dump_json(exclude={name for name, told in left_out.items() if not told})
    # The mode "x" refuses to replace a manifest, since a sealed directory never changes.
    with (directory / MANIFEST).open("xb") as file:
        file.write(_wrap(body.encode()))
        file.flush()
        os.fsync(file.fileno())
    # The fsync of a file preserves only the content of the file in a power failure. The name of the
    # file needs an fsync of the directory.
    for path in [*directory.rglob("*"), directory]:
        if path.is_dir():
            fsync_directory(path)
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint, and check its content against its digest.

    Raises:
      DamageError: the manifest is missing, unreadable, changed, or of another format.
    """
    try:
        raw = read_regular(directory / MANIFEST)
    except OSError as error:
        raise DamageError(f"{MANIFEST}: {_reason(error)}") from error
    body = raw[_HEAD_BYTES:-_TAIL_BYTES]
    if _wrap(body) != raw:
        raise DamageError(f"{MANIFEST}: the content does not match the recorded digest")
    try:
        return Manifest.model_validate_json(body)
    except ValueError as error:
        raise DamageError(f"{MANIFEST}: {' '.join(str(error).split())}") from error


def check_files(directory: Path, manifest: Manifest) -> None:
    """Check that every file of a checkpoint has the size and digest in the manifest.

    Raises:
      DamageError: files are missing, changed, or of another length than in the manifest; the
        message names these files.
    """

    def problem(name: str, expected: FileRecord) -> str | None:
        try:
            found = record_of(directory / name)
        except OSError as error:
            return f"{name}: {_reason(error)}"
        if found.bytes != expected.bytes:
            return (
                f"{name}: the file has {found.bytes} bytes, but {expected.bytes} bytes were written"
            )
        if found != expected:
            return f"{name}: the content does not match the recorded digest"
        return None

    with ThreadPoolExecutor() as pool:
        results = pool.map(problem, manifest.files, manifest.files.values())
        problems = [text for text in results if text is not None]
    if problems:
        raise DamageError(some_of(problems, _LISTED_PROBLEMS, "; "))


def _reason(error: OSError) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else (error.strerror or str(error))
