"""The writing and reading of a tree's arrays, in any sharding, without a change of any bit.

Each large array has separate files (`pieces`). Orbax writes the small arrays, as a flat mapping
from a leaf's number to the leaf's array. The manifest has the names of the leaves. The structure
(None, empty containers, namedtuples) is not stored; a load takes the structure from the target.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdist.checkpoint import pieces
from jaxdist.checkpoint.layout import ARRAYS
from jaxdist.checkpoint.manifest import Cuts, FileRecord, LeafRecord, Manifest
from jaxdist.checkpoint.reasons import is_disk_full
from jaxdist.checkpoint.structure import is_key, named_leaves
from jaxdist.types import Leaf, PyTree

WRITE_TIMEOUT_SECONDS = 1200
MOST_FAILURES = 100
"""The largest number of errors to fetch after a save. This number exceeds the number of files that
orbax writes.
"""


@cache
def _orbax() -> Any:
    """Import orbax, mute its log, and return the module; the first call takes longest.

    The import takes longer than the import of jax, so it is not at the top of this file. Orbax logs
    each error that it raises with a traceback; the store instead reports each error in one line.
    """
    import orbax.checkpoint

    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_not_from_orbax)
    sys.unraisablehook = partial(_unless_too_late, sys.unraisablehook)
    return orbax.checkpoint


def _not_from_orbax(record: logging.LogRecord) -> bool:
    # asyncio logs failed writes that are not awaited. Only the text of such a record shows whether
    # the write was by orbax or tensorstore.
    text = f"{record.pathname} {record.getMessage()}"
    full = record.exc_info is not None and is_disk_full(record.exc_info[1])
    return not (full or "orbax" in text or "tensorstore" in text)


def _unless_too_late(say: Callable[[Any], None], unraisable: Any) -> None:
    # Orbax closes the event loop after the first failed write, but tensorstore still uses the loop
    # to report further failed writes.
    if unraisable.object is not None or str(unraisable.exc_value) != "Event loop is closed":
        say(unraisable)


def _number(index: int) -> str:
    return f"{index:06d}"


def _pack(tree: PyTree) -> dict[str, tuple[str, jax.Array]]:
    """Return, by name, each leaf's number and its array in the form that checkpoints store.

    Random keys are converted to integers, and arrays without elements are left out.
    """
    return {
        name: (_number(index), jax.random.key_data(leaf) if is_key(leaf) else leaf)
        for index, (name, leaf) in enumerate(named_leaves(tree).items())
        if leaf.size
    }


class LargeArrayFiles(NamedTuple):
    """The files that all processes together write for the large arrays of a tree.

    Attributes:
      cuts: for each large array, by tree path, the positions at which it is divided into files.
      bytes: the length of each file, by its path inside the checkpoint.
    """

    cuts: dict[str, Cuts]
    bytes: dict[str, int]


class ArrayWriter:
    """A writer that saves one tree of arrays at a time, in the background.

    Every process calls each method.

    Args:
      chunk_bytes: the largest size, in bytes, of a file of a divided array. An array of at least
        this size is divided into separate files, unless its shards are smaller than an eighth of
        this size.
    """

    def __init__(self, chunk_bytes: int = pieces.CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._pieces: list[pieces.Piece] = []
        ocp = _orbax()
        self._tree_args = ocp.args.PyTreeSave
        self._barrier = ocp.multihost.get_barrier_sync_fn()
        # By default, orbax cuts each array into slices for its replicas, and compiles a program for
        # each slice. The arrays that orbax gets here are too small to gain from slices.
        handler = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
        kinds = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
        self._orbax = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(type_handler_registry=kinds),
            async_options=ocp.AsyncOptions(
                timeout_secs=WRITE_TIMEOUT_SECONDS, create_directories_asynchronously=False
            ),
        )

    def start(self, path: Path, tree: PyTree) -> LargeArrayFiles:
        """Copy the arrays to the host, start to write the small arrays below `path`, and return.

        The caller may donate the arrays after this call. The returned files are not written yet.
        """
        packed = _pack(tree)
        found = {
            name: pieces.array_cuts(array, self._chunk_bytes) for name, (_, array) in packed.items()
        }
        cuts = {name: ends for name, ends in found.items() if ends is not None}
        large = [(*packed.pop(name), ends) for name, ends in cuts.items()]
        self._begin(path / ARRAYS, dict(packed.values()))
        self._pieces = [piece for one in large for piece in pieces.copy_pieces(*one)]
        sizes = [pieces.sizes(number, ends, array.dtype) for number, array, ends in large]
        return LargeArrayFiles(cuts, {name: size for one in sizes for name, size in one.items()})

    def _begin(self, path: Path, packed: dict[str, jax.Array]) -> None:
        if packed:
            try:
                self._orbax.save(path, args=self._tree_args(packed))
            # Orbax keeps its errors, and would raise them again in the `wait` of the next save.
            # Therefore all errors are fetched here.
            except Exception:
                self._failures()
                raise

    def place(self, path: Path, known: pieces.Known) -> dict[str, FileRecord]:
        """Write this process's chunks of the large arrays below `path`, and return their records.

        If a known file has the same content as a chunk, the method makes a hard link to that file
        instead. The keys of the records are paths inside the checkpoint.

        Raises:
          OSError: a file cannot be written.
        """
        held, self._pieces = self._pieces, []
        return pieces.place_pieces(path, held, known)

    def wait(self) -> None:
        """Wait until the small arrays of all processes are on disk, or raise the first error."""
        failures = self._failures()
        if failures:
            raise failures[0]

    def _failures(self) -> list[Exception]:
        """Return all errors of a save; a call of orbax raises only one of them."""
        found: list[Exception] = []
        while len(found) < MOST_FAILURES:
            try:
                self._orbax.wait_until_finished()
            except Exception as error:
                found.append(error)
            else:
                break
        return found

    def barrier(self, name: str) -> None:
        """Wait for all processes through jax's coordination service.

        A collective on devices is not possible here: it would have to run on the main thread, in
        the same order in every process.
        """
        self._barrier(key=name, timeout_ms=WRITE_TIMEOUT_SECONDS * 1000)

    def close(self) -> None:
        """Stop orbax's threads."""
        self._orbax.close()


def load_arrays(path: Path, manifest: Manifest, target: PyTree) -> PyTree:
    """Load the tree of the checkpoint at `path`, with the structure and shardings of `target`.

    Every process calls this function. Arrays that `target` lacks are not loaded. The caller must
    have compared shapes and dtypes. If `target` pads an array, the elements beyond the saved shape
    are zeros.
    """
    saved = manifest.leaves
    numbers = {name: _number(index) for index, name in enumerate(saved)}
    wanted = named_leaves(target)
    stored = {numbers[name]: _stored(leaf, saved[name]) for name, leaf in wanted.items()}
    large = {numbers[name]: cuts for name, cuts in manifest.cuts.items() if name in wanted}
    packed = {n: leaf for n, leaf in stored.items() if n not in large and leaf.size}
    whole = wanted.keys() | manifest.cuts.keys() == saved.keys()
    loaded = _load_packed(path / ARRAYS, packed, whole=whole) if packed else {}
    for number, leaf in stored.items():
        if number in large:
            loaded[number] = pieces.load_array(path, number, large[number], leaf)
        elif not leaf.size:
            loaded[number] = jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)
    leaves = [_unpack(pieces.owned(loaded.pop(numbers[name])), saved[name]) for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(target), leaves)


def _load_packed(
    path: Path, stored: dict[str, jax.ShapeDtypeStruct], *, whole: bool
) -> dict[str, jax.Array]:
    """Load arrays from orbax's files, and return them by their numbers.

    Args:
      whole: whether `stored` contains all arrays of these files. If not, orbax must be called in
        another form.
    """
    ocp = _orbax()
    # With `strict=False`, orbax cuts an array, or pads it with zeros, if the target has another
    # length than the array.
    restore_args = {
        number: ocp.ArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=False
        )
        for number, leaf in stored.items()
    }
    args = ocp.args.PyTreeRestore(
        item=dict.fromkeys(restore_args, 0), restore_args=restore_args, partial_restore=not whole
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(path, args=args)


def _stored(leaf: Leaf, record: LeafRecord) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype that a leaf has on disk, with the sharding of the leaf."""
    assert leaf.sharding is not None, f"a target leaf {leaf} has no sharding"
    if record.key_impl is None:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=leaf.sharding)


def _unpack(array: jax.Array, record: LeafRecord) -> jax.Array:
    if record.key_impl is None:
        return array
    return jax.random.wrap_key_data(array, impl=record.key_impl)
