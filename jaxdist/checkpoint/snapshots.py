"""Snapshots of the state, in a machine's memory or on its disk, from which a run resumes.

No process waits for another process. Each process writes the shards that it holds, but only
replica 0 of each shard, so that each shard of the state is written once. A snapshot is complete
when the files of all processes exist.

FOLDER/step_00000120.1_of_4      the part of step 120 that process 1 of 4 writes:
    a line of JSON               names and positions of the pieces, metadata, a digest of all
    raw bytes                    the pieces, one after another
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.checkpoint.layout import fsync_directory, snapshot_name, snapshot_of
from jaxdist.checkpoint.pieces import copy_common, owned
from jaxdist.checkpoint.structure import named_leaves
from jaxdist.config.files import parse_json, read_regular
from jaxdist.errors import CheckpointError, os_errors_as
from jaxdist.types import Json, JsonObject, PyTree

KEEP = 2
"""The number of snapshots to keep: 2, since the newest snapshot may be incomplete."""
Span = tuple[tuple[int, int], ...]
"""The start and the end of a part of an array in each dim."""


@dataclass(frozen=True)
class _Piece:
    name: str
    span: Span
    array: np.ndarray


class Snapshots:
    """The writer of a process's snapshots; a context manager that waits for the last snapshot.

    Args:
      folder: the folder in this machine's memory or on its disk, which is created if it is missing.
      process: the number of this process.
      count: the number of processes of the run.
      say: the function that is called with a line when a snapshot cannot be written; the run
        continues.
      lasts: whether the folder is on a disk, where files must survive a crash of the machine.

    Raises:
      CheckpointError: the folder cannot be created.
    """

    def __init__(
        self,
        folder: Path,
        process: int,
        count: int,
        say: Callable[[str], None],
        *,
        lasts: bool = False,
    ) -> None:
        with os_errors_as(
            CheckpointError,
            f"snapshots cannot be kept in {folder}",
            "choose another checkpoint.local.directory",
        ):
            folder.mkdir(parents=True, exist_ok=True)
        self._lasts = lasts
        self.folder, self._process, self._count, self._say = folder, process, count, say
        self._thread: threading.Thread | None = None
        self._failed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.wait()

    def take(self, step: int, state: PyTree, metadata: Mapping[str, Json]) -> None:
        """Copy this process's part of the state to the host, and write it in the background.

        The call first waits for the previous snapshot. The caller may donate `state` after this
        call.
        """
        self.wait()
        pieces = list(_pieces(state))
        given = (step, pieces, dict(metadata))
        self._thread = threading.Thread(target=self._write, args=given, name=f"snapshot-{step}")
        self._thread.start()

    def forget(self, after: int) -> None:
        """Delete the snapshots of all steps later than `after`, the step at which the run resumed.

        The run repeats these steps, and must not resume from snapshots of their first execution.
        """
        self._unlink(lambda step: step > after)

    def _unlink(self, old: Callable[[int], bool]) -> None:
        for path in self.folder.glob("step_*"):
            part = snapshot_of(path.name)
            if part is not None and old(part[0]):
                path.unlink(missing_ok=True)

    def wait(self) -> None:
        """Wait until this process's part of the last snapshot is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, pieces: list[_Piece], metadata: JsonObject) -> None:
        path = self.folder / snapshot_name(step, self._process, self._count)
        # Readers ignore names with a leading dot, so that an incomplete file is not counted.
        staging = path.with_name(f".{path.name}")
        try:
            with staging.open("wb") as file:
                file.write(_header(pieces, metadata))
                for piece in pieces:
                    file.write(_raw(piece.array))
                # On a disk, the rename may survive a crash of the machine although the content does
                # not. A file in memory never survives such a crash, so an fsync would only take
                # time.
                if self._lasts:
                    file.flush()
                    os.fsync(file.fileno())
            staging.rename(path)
            if self._lasts:
                fsync_directory(self.folder)
            self._failed = 0
            self._prune()
        except OSError as error:
            self._failed += 1
            times = self._failed
            # Only failures 1, 2, 4, 8, ... are reported, since every snapshot fails while the
            # memory or the disk is full.
            if times & (times - 1) == 0:
                again = f" ({times} times in a row)" if times > 1 else ""
                why = error.strerror or error
                self._say(
                    f"cannot write the snapshot of step {step} into {self.folder}: {why}{again}"
                )
            staging.unlink(missing_ok=True)

    def _prune(self) -> None:
        """Delete this process's old files and, on a disk, also older files of other processes.

        Otherwise a run that continues with fewer processes would keep the files of the missing
        processes.
        """
        found = sorted(self.folder.glob(f"step_*.{self._process}_of_{self._count}"))
        for path in found[:-KEEP]:
            path.unlink(missing_ok=True)
        oldest = snapshot_of(found[-KEEP:][0].name)
        if self._lasts and oldest is not None:
            self._unlink(lambda step: step < oldest[0])


def _pieces(state: PyTree) -> Iterator[_Piece]:
    """Yield copies of replica 0 of each shard that this process holds."""
    leaves = named_leaves(state)
    # All copies to the host begin before the first copy is awaited, so that they overlap.
    for leaf in leaves.values():
        leaf.copy_to_host_async()
    for name, leaf in leaves.items():
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0 and shard.data.size:
                # Without this copy the array could share a CPU device's memory, which may be
                # donated.
                copied = np.array(shard.data, copy=True, order="C")
                yield _Piece(name, _span(shard.index, leaf.shape), copied)


def _span(index: tuple[slice, ...], shape: tuple[int, ...]) -> Span:
    pairs = zip(index, shape, strict=True)
    return tuple(
        (part.start or 0, size if part.stop is None else part.stop) for part, size in pairs
    )


def _raw(array: np.ndarray) -> memoryview:
    """Return an array's bytes as a view of uint8, because a bfloat16 array has no buffer."""
    return array.reshape(-1).view(np.uint8).data


def _header(pieces: list[_Piece], metadata: JsonObject) -> bytes:
    told = [[piece.name, piece.span, str(piece.array.dtype)] for piece in pieces]
    body = json.dumps({"pieces": told, "metadata": metadata})
    # The body is stored as text inside JSON, so that the digest covers exactly these bytes.
    digest = _digest(body, *(_raw(piece.array) for piece in pieces))
    return json.dumps({"blake2b": digest, "body": body}).encode() + b"\n"


def _digest(body: str, *raw: bytes | memoryview) -> str:
    digest = hashlib.blake2b(body.encode(), digest_size=32)
    for one in raw:
        digest.update(one)
    return digest.hexdigest()


def whole_steps(folder: Path) -> list[int]:
    """Return the steps for which the folder has the files of all processes, in ascending order.

    Files that were written by different numbers of processes are not combined.
    """
    return sorted(_whole(folder))


def _whole(folder: Path) -> dict[int, list[Path]]:
    """Return the complete set of files of each step; if there are several sets, the largest set."""
    found: dict[tuple[int, int], list[Path]] = {}
    for path in sorted(folder.glob("step_*")):
        part = snapshot_of(path.name)
        if part is not None:
            step, _, count = part
            found.setdefault((step, count), []).append(path)
    return {step: files for (step, count), files in sorted(found.items()) if len(files) == count}


def load_snapshot(folder: Path, step: int, target: PyTree) -> tuple[PyTree, JsonObject]:
    """Load the state and the metadata of a snapshot.

    Args:
      target: a tree of `jax.ShapeDtypeStruct` with shardings, on any mesh.

    Raises:
      CheckpointError: a file is damaged, or the snapshot's state does not fit the target.
    """
    pieces: dict[str, list[_Piece]] = {}
    metadata: JsonObject = {}
    for path in _whole(folder).get(step, []):
        found, metadata = _read(path)
        for piece in found:
            pieces.setdefault(piece.name, []).append(piece)
    leaves = [
        _placed(name, pieces.get(name, []), leaf) for name, leaf in named_leaves(target).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(target), leaves), metadata


def _read(path: Path) -> tuple[list[_Piece], JsonObject]:
    """Return the pieces and the metadata in a snapshot file.

    Raises:
      CheckpointError: the file cannot be read, or its content does not match its digest.
    """
    also = (ValueError, KeyError, TypeError, AttributeError)
    with os_errors_as(CheckpointError, f"snapshot {path.name}", also=also):
        head, _, raw = read_regular(path).partition(b"\n")
        sealed: Any = parse_json(head)
        if _digest(sealed["body"], raw) != sealed["blake2b"]:
            raise ValueError("the content does not match the recorded digest")
        told: Any = parse_json(sealed["body"])
        pieces, offset = [], 0
        for name, span, dtype in told["pieces"]:
            shape = tuple(stop - start for start, stop in span)
            array = np.frombuffer(raw, jnp.dtype(dtype), int(np.prod(shape)), offset)
            pieces.append(_Piece(name, tuple(map(tuple, span)), array.reshape(shape)))
            offset += array.nbytes
    return pieces, told["metadata"]


def _placed(name: str, pieces: list[_Piece], leaf: Any) -> jax.Array:
    size = sum(piece.array.size for piece in pieces)
    kinds = {(str(piece.array.dtype), len(piece.span)) for piece in pieces}
    ends = [max((p.span[at][1] for p in pieces), default=0) for at in range(len(leaf.shape))]
    fits = kinds <= {(str(leaf.dtype), len(leaf.shape))} and tuple(ends) == leaf.shape
    if size != leaf.size or (size and not fits):
        raise CheckpointError(
            f"the snapshot's {name} has another dtype or shape than the "
            f"{leaf.dtype}{list(leaf.shape)} of this state"
        )

    def part(index: Any) -> np.ndarray:
        return _assembled(pieces, _span(index, leaf.shape), leaf)

    return owned(jax.make_array_from_callback(leaf.shape, leaf.sharding, part))


def _assembled(pieces: list[_Piece], span: Span, leaf: Any) -> np.ndarray:
    """Return the part of an array that a device holds, from all pieces that overlap this part."""
    for piece in pieces:
        # A resume on the same mesh, which is the usual case, needs no copy.
        if piece.span == span:
            return piece.array
    out = np.empty([stop - start for start, stop in span], leaf.dtype)
    corner = [start for start, _ in span]
    for piece in pieces:
        copy_common(out, corner, piece.array, [start for start, _ in piece.span])
    return out
