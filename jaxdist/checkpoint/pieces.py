"""Large arrays in separate files, one for each chunk of rows.

A file that is equal to an earlier file is a hard link to the earlier file.

pieces/000012/          array number 12
  0.0                   its chunk that begins at row 0 and column 0: raw bytes in C order
  341.0                 the next chunk

A file of an earlier step with the same digest is reused, even if it belongs to another array. Since
the new step has a hard link to the file, each step is complete without the other steps, and a
deletion needs no count of references. On a file system without hard links, the file is written
again.
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
"""The number N such that orbax packs arrays whose shards are smaller than 1 / N of a chunk. In
separate files, such arrays would make too many files.
"""


class Piece(NamedTuple):
    """A chunk of an array, which is written to a file.

    Attributes:
      name: the path of the file inside the checkpoint.
      block: the content of the chunk, as a contiguous array on the host.
    """

    name: str
    block: np.ndarray


def array_cuts(array: jax.Array, chunk_bytes: int) -> Cuts | None:
    """Return the positions, in each dim, at which a large array is divided into chunk files.

    Each chunk has elements of a single shard, and rows that fit into a chunk are not divided. The
    result is None if the array or its shards are too small to be divided. Such an array is saved
    together with other arrays.

    Args:
      array: the array to save.
      chunk_bytes: the largest number of bytes of a chunk.

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
    """Return the positions, in each dim, at which an array of any size is divided into chunks.

    Args:
      shape: the shape of the array.
      shard: the shape of each shard.
      item: the number of bytes of an element.
      chunk_bytes: the largest number of bytes of a chunk.
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
    """Return the path inside the checkpoint of the chunk of array `number` that begins at `begin`.

    >>> piece_name("000012", (341, 0))
    'pieces/000012/341.0'
    """
    return f"{PIECES}/{number}/{'.'.join(map(str, begin)) or 0}"


def sizes(number: str, cuts: Cuts, dtype: np.dtype) -> dict[str, int]:
    """Return the number of bytes of each file of an array, by path, in all processes."""
    whole = [ends[-1] for ends in cuts]
    return {
        piece_name(number, begin): math.prod(e - b for b, e in zip(begin, end, strict=True))
        * dtype.itemsize
        for begin, end in _blocks(cuts, [0] * len(whole), whole)
    }


def copy_pieces(number: str, array: jax.Array, cuts: Cuts) -> list[Piece]:
    """Copy to the host those chunks of an array that this process has to write.

    Args:
      number: the number of the array.
      array: the array to save.
      cuts: the positions, in each dim, at which the array is divided into chunks.
    """
    found: list[Piece] = []
    # Only replica 0 is copied, so that exactly one process writes each chunk. All copies start
    # before the first copy is awaited, so that they overlap.
    shards = [shard for shard in array.addressable_shards if not shard.replica_id]
    for shard in shards:
        shard.data.copy_to_host_async()
    for shard in shards:
        # Without this copy, the result could share the memory of an array on CPU, which the next
        # step may overwrite.
        held = np.array(shard.data, order="C")
        corner = tuple(part.start or 0 for part in shard.index)
        found += _pieces(number, cuts, corner, held)
    return found


def _pieces(number: str, cuts: Cuts, corner: Sequence[int], box: np.ndarray) -> Iterator[Piece]:
    """Yield the chunks of an array in `box`; the first element of `box` has the index `corner`."""
    for begin, end in _blocks(cuts, corner, box.shape):
        inside = tuple(slice(b - c, e - c) for b, e, c in zip(begin, end, corner, strict=True))
        yield Piece(piece_name(number, begin), np.ascontiguousarray(box[inside]))


def _blocks(
    cuts: Cuts, corner: Sequence[int], shape: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the start and the end of each chunk that overlaps a box, in C order.

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
    """An index of the files of earlier steps and of this step, by their digests.

    Args:
      steps: the directory and the manifest of each earlier step. If several files have the same
        digest, the file of the last step is used.
      on_event: the function that is called with a line about each file that is found damaged.
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
        """Create `path` as a hard link to a known file with this record; return False on failure.

        The known file is first read and compared with its digest, since damage must not spread to
        later steps.
        """
        source = self._paths.get(record.blake2b)
        if source is None:
            return False
        try:
            if record_of(source) != record:
                self._on_event(f"{source} is damaged: the file is written again instead of linked")
                return False
            os.link(source, path)
        except OSError:  # The earlier file is gone, or the file system refuses links.
            return False
        return True

    def add(self, record: FileRecord, path: Path) -> None:
        """Add a complete file, so that later chunks with the same content become links to it."""
        self._paths[record.blake2b] = path


def write_rows(
    staging: Path, number: str, rows: Iterable[np.ndarray], cuts: Cuts
) -> dict[str, FileRecord]:
    """Write an array that is given in parts, and return the records of the files, by path.

    Args:
      staging: the folder of the checkpoint that is being written.
      number: the number of the array.
      rows: the parts of the array along its first dim, in order. Each part begins where a chunk
        begins.
      cuts: the positions, in each dim, at which the array is divided into chunks.

    Raises:
      OSError: a file cannot be written.
    """
    records: dict[str, FileRecord] = {}
    known, at = Known((), print), 0
    (staging / PIECES / number).mkdir(parents=True, exist_ok=True)
    for part in rows:
        corner = [at, *[0] * (part.ndim - 1)][: part.ndim]
        for name, block in _pieces(number, cuts, corner, part):
            records[name] = _place(staging / name, block, known)
        at += len(part) if part.ndim else 1
    return records


def place_pieces(staging: Path, pieces: Sequence[Piece], known: Known) -> dict[str, FileRecord]:
    """Write each chunk to a file, and return the records of the files, by path.

    If an earlier file has the same content, a hard link to that file is made instead.

    Args:
      staging: the folder of the checkpoint that is being written.
      pieces: the chunks of arrays.
      known: the earlier files, to which the new files are added.

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
        # The mode "x" does not open an existing file, which could be a link: a write to a link
        # would change an earlier step.
        with path.open("xb") as file:
            file.write(data)
        known.add(record, path)
    return record


def load_array(directory: Path, number: str, cuts: Cuts, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """Load an array from its chunks, with the sharding of `wanted`.

    Each process reads only the chunks that its devices need. If `wanted` is larger than the saved
    array, the elements beyond the saved array are zeros.

    Raises:
      OSError: a file cannot be read.
      ValueError: the length of a file is not the expected length.
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
    """Return a copy of an array on CPU devices in which each device has a separate buffer.

    On CPU, an array that was made from a NumPy array may use NumPy's memory, and devices with equal
    shards then share a buffer. Such a buffer cannot be donated, and the first step after a resume
    would hold two states in memory.
    """
    if next(iter(array.sharding.device_set)).platform != "cpu":
        return array
    kind = array.sharding.memory_kind
    parts = [
        jax.device_put(
            shard.data,
            jax.sharding.SingleDeviceSharding(shard.device, memory_kind=kind),
            may_alias=False,
        )
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
        copy_common(out, corner, block, begin)
    return out


def copy_common(
    out: np.ndarray, corner: Sequence[int], block: np.ndarray, begin: Sequence[int]
) -> None:
    """Copy from `block` to `out` the elements of an array that both have.

    Args:
      out: a part of the array, to which elements are copied.
      corner: the index of the first element of `out` in the array.
      block: another part of the array.
      begin: the index of the first element of `block` in the array.
    """
    common = [
        (max(c, b), min(c + n, b + size))
        for c, n, b, size in zip(corner, out.shape, begin, block.shape, strict=True)
    ]
    if all(first < last for first, last in common):
        to, of = (
            tuple(slice(first - o, last - o) for (first, last), o in zip(common, at, strict=True))
            for at in (corner, begin)
        )
        out[to] = block[of]
