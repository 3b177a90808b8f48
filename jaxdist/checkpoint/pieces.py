"""Large arrays in files of their own, cut by rows; equal files of an earlier step are hard-linked.

pieces/000012/          array number 12
  0.0                   its block that begins at row 0 and column 0: raw bytes in C order
  341.0                 the next block

Any file of an earlier step with the same digest is reused, for any array. A hard link gives the new
step the file of an earlier step under a name of its own, so that each step remains complete by
itself and deletion needs no reference counts. On a file system without hard links the file is
written instead.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxdist.checkpoint.layout import PIECES
from jaxdist.checkpoint.manifest import DIGEST_BYTES, Cuts, FileRecord, Manifest, record_of

CHUNK_BYTES = 1 << 20
_LEAST_SHARE = 8
"""Arrays whose shards are smaller than a chunk divided by this number are packed by orbax, since
they would make too many files."""


class Piece(NamedTuple):
    """A block of an array, to be written to a file.

    Attributes:
      name: path inside the checkpoint.
      block: the block on the host, contiguous.
    """

    name: str
    block: np.ndarray


def array_cuts(array: jax.Array, chunk_bytes: int) -> Cuts | None:
    """Return the cuts of a large array, each of whose files holds blocks of a single shard.

    The result is None for an array that is too small, or whose shards are too small, for files of
    its own. Rows that fit into a chunk are never cut.

    >>> array_cuts(jax.numpy.zeros((5, 4)), chunk_bytes=32)
    ((0, 2, 4, 5), (0, 4))
    """
    shard = array.sharding.shard_shape(array.shape)
    item = array.dtype.itemsize
    small = math.prod(shard) * item * _LEAST_SHARE < chunk_bytes
    if small or array.nbytes < chunk_bytes or not array.shape:
        return None
    return sharded_cuts(array.shape, shard, item, chunk_bytes)


def sharded_cuts(
    shape: tuple[int, ...], shard: tuple[int, ...], item: int, chunk_bytes: int
) -> Cuts:
    """Return the cuts of an array of any size, given the shape of its shards.

    Args:
      item: number of bytes of an element.
    """
    lengths = list(shard)
    for dim in range(len(shard)):
        row_bytes = item * math.prod(shard[dim + 1 :])
        lengths[dim] = min(shard[dim], max(1, chunk_bytes // row_bytes))
        if row_bytes <= chunk_bytes:
            break
    return tuple(
        (*(s + i for s in range(0, size, own) for i in range(0, own, length)), size)
        for size, own, length in zip(shape, shard, lengths, strict=True)
    )


def piece_name(number: str, begin: Sequence[int]) -> str:
    """Return the path inside the checkpoint of the block of array `number` that begins at `begin`.

    >>> piece_name("000012", (341, 0))
    'pieces/000012/341.0'
    """
    return f"{PIECES}/{number}/{'.'.join(map(str, begin)) or 0}"


def sizes(number: str, cuts: Cuts, dtype: np.dtype) -> dict[str, int]:
    """Return the bytes of each file of an array by name, whichever process writes the file."""
    whole = [ends[-1] for ends in cuts]
    return {
        piece_name(number, begin): math.prod(e - b for b, e in zip(begin, end, strict=True))
        * dtype.itemsize
        for begin, end in _blocks(cuts, [0] * len(whole), whole)
    }


def copy_pieces(number: str, array: jax.Array, cuts: Cuts) -> list[Piece]:
    """Copy the blocks of an array that this process writes to the host."""
    found: list[Piece] = []
    # Only replica 0 is copied, so that each block is written by one process. All copies start
    # before the first is awaited, so that they overlap.
    shards = [shard for shard in array.addressable_shards if not shard.replica_id]
    for shard in shards:
        shard.data.copy_to_host_async()
    for shard in shards:
        # Without a copy, the result could be the array's own memory on CPU, which the next step may
        # overwrite.
        held = np.array(shard.data, order="C")
        corner = tuple(part.start or 0 for part in shard.index)
        for begin, end in _blocks(cuts, corner, held.shape):
            inside = tuple(slice(b - c, e - c) for b, e, c in zip(begin, end, corner, strict=True))
            found.append(Piece(piece_name(number, begin), np.ascontiguousarray(held[inside])))
    return found


def _blocks(
    cuts: Cuts, corner: Sequence[int], shape: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the begin and end of each block that overlaps a box, in C order.

    Args:
      corner: the first element of the box in each dim.
      shape: the shape of the box.
    """
    overlapping = [
        [pair for pair in itertools.pairwise(ends) if pair[0] < c + n and c < pair[1]]
        for ends, c, n in zip(cuts, corner, shape, strict=True)
    ]
    for block in itertools.product(*overlapping):
        yield tuple(begin for begin, _ in block), tuple(end for _, end in block)


class Known:
    """An index by digest of the files of earlier steps and of this step.

    Args:
      steps: directory and manifest of each step; if files are equal, the last step's file is used.
      on_event: function that is called with a line about a file that proves damaged.
    """

    def __init__(
        self, steps: Iterable[tuple[Path, Manifest]], on_event: Callable[[str], None]
    ) -> None:
        self._on_event = on_event
        self._paths = {
            record.blake2b: path / name
            for path, manifest in steps
            for name, record in manifest.files.items()
            if name.startswith(f"{PIECES}/")
        }

    def link(self, record: FileRecord, path: Path) -> bool:
        """Create `path` as a hard link to a known file with this record; return whether it worked.

        The known file is read first, since damage must not spread to later steps.
        """
        source = self._paths.get(record.blake2b)
        if source is None:
            return False
        try:
            if record_of(source) != record:
                self._on_event(f"{source} is damaged: it is written again instead of linked")
                return False
            os.link(source, path)
        except OSError:  # The file is gone or on another disk, or the file system refuses links.
            return False
        return True

    def add(self, record: FileRecord, path: Path) -> None:
        """Add a complete file, to which later pieces with the same content are then linked."""
        self._paths[record.blake2b] = path


def write_rows(
    staging: Path, number: str, rows: Iterable[np.ndarray], cuts: Cuts
) -> dict[str, FileRecord]:
    """Write an array that is given part by part, and return the files' records by name.

    Args:
      rows: parts of the array along its first dim, in order; each begins at a cut.

    Raises:
      OSError: a file cannot be written.
    """
    records: dict[str, FileRecord] = {}
    known, at = Known((), print), 0
    (staging / PIECES / number).mkdir(parents=True, exist_ok=True)
    for part in rows:
        corner = [at, *[0] * (part.ndim - 1)][: part.ndim]
        for begin, end in _blocks(cuts, corner, part.shape):
            inside = tuple(slice(b - c, e - c) for b, e, c in zip(begin, end, corner, strict=True))
            name = piece_name(number, begin)
            records[name] = _place(staging / name, np.ascontiguousarray(part[inside]), known)
        at += len(part) if part.ndim else 1
    return records


def place_pieces(staging: Path, pieces: Sequence[Piece], known: Known) -> dict[str, FileRecord]:
    """Write or link each piece, and return the files' records by name.

    Raises:
      OSError: a file cannot be written.
    """
    for folder in {(staging / piece.name).parent for piece in pieces}:
        folder.mkdir(parents=True, exist_ok=True)
    # Threads suffice, because hashing and writing release the GIL.
    with ThreadPoolExecutor() as pool:
        records = pool.map(lambda piece: _place(staging / piece.name, piece.block, known), pieces)
        return dict(zip((piece.name for piece in pieces), records, strict=True))


def _place(path: Path, block: np.ndarray, known: Known) -> FileRecord:
    data = block.reshape(-1).view(np.uint8).data
    digest = hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
    record = FileRecord(bytes=len(data), blake2b=digest)
    if not known.link(record, path):
        # The mode "x" never opens an existing file, which could be a link: writing to it would
        # change an earlier step.
        with path.open("xb") as file:
            file.write(data)
        known.add(record, path)
    return record


def load_array(directory: Path, number: str, cuts: Cuts, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """Load an array from its pieces, in the sharding of `wanted`.

    Each process reads only the blocks that its devices need. Elements of `wanted` beyond the saved
    array are zeros.

    Raises:
      OSError: a file cannot be read.
      ValueError: a file has another length.
    """
    done: dict[str, np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        # The key is text, since slices cannot be hashed before Python 3.12.
        if str(index) not in done:  # Replicas share the same block, which is read once.
            done[str(index)] = _read(directory, number, cuts, wanted, index)
        return done[str(index)]

    return jax.make_array_from_callback(wanted.shape, wanted.sharding, part)


def owned(array: jax.Array) -> jax.Array:
    """Copy an array on CPU devices, so that each device has a buffer of its own.

    On CPU an array from NumPy may use NumPy's memory, which devices with equal blocks share. Such a
    buffer cannot be donated, so the first step after a resume would have two states in memory.
    """
    if next(iter(array.sharding.device_set)).platform != "cpu":
        return array
    parts = [
        jax.device_put(shard.data, shard.device, may_alias=False)
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def _read(
    directory: Path,
    number: str,
    cuts: Cuts,
    wanted: jax.ShapeDtypeStruct,
    index: tuple[slice, ...],
) -> np.ndarray:
    ranges = [part.indices(size) for part, size in zip(index, wanted.shape, strict=True)]
    corner = [begin for begin, _, _ in ranges]
    out = np.zeros([end - begin for begin, end, _ in ranges], wanted.dtype)
    for begin, end in _blocks(cuts, corner, out.shape):
        shape = [e - b for b, e in zip(begin, end, strict=True)]
        data = (directory / piece_name(number, begin)).read_bytes()
        block = np.frombuffer(data, wanted.dtype).reshape(shape)
        to, of = [], []
        for b, e, c, n in zip(begin, end, corner, out.shape, strict=True):
            first, last = max(b, c), min(e, c + n)
            to.append(slice(first - c, last - c))
            of.append(slice(first - b, last - b))
        out[tuple(to)] = block[tuple(of)]
    return out
