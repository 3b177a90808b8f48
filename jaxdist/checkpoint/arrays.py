"""The arrays of a tree to files and back, into any sharding, bit for bit.

Large ones go to files of their own (`pieces`), the others to orbax, of which this is the thin edge:
it sees a flat mapping from the leaf's number to its array. The structure (None, empty
containers, namedtuples) comes from the target when loading; the names stand in the manifest.
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
"""Of one save: more than orbax has files of its own."""


@cache
def _orbax() -> Any:
    """The orbax module, imported on first use (it takes longer than jax) and without its log lines.

    Orbax logs with a traceback what it raises; the store says it in one line.
    """
    import orbax.checkpoint

    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_not_from_orbax)
    sys.unraisablehook = partial(_unless_too_late, sys.unraisablehook)
    return orbax.checkpoint


def _not_from_orbax(record: logging.LogRecord) -> bool:
    # asyncio logs failed writes that nobody awaits, with their origin in the text only, if at all.
    text = f"{record.pathname} {record.getMessage()}"
    full = record.exc_info is not None and is_disk_full(record.exc_info[1])
    return not (full or "orbax" in text or "tensorstore" in text)


def _unless_too_late(say: Callable[[Any], None], unraisable: Any) -> None:
    # At the first write that fails orbax leaves the loop where tensorstore tells of the others.
    if unraisable.object is not None or str(unraisable.exc_value) != "Event loop is closed":
        say(unraisable)


def _number(index: int) -> str:
    return f"{index:06d}"


def _pack(tree: PyTree) -> dict[str, tuple[str, jax.Array]]:
    """Number and array by name as files can have them: no empty ones, random keys as integers."""
    return {
        name: (_number(index), jax.random.key_data(leaf) if is_key(leaf) else leaf)
        for index, (name, leaf) in enumerate(named_leaves(tree).items())
        if leaf.size
    }


class Whole(NamedTuple):
    """What all processes write together of the large arrays of a tree.

    Attributes:
      cuts: see `Manifest`.
      bytes: length of every file by its path inside the checkpoint.
    """

    cuts: dict[str, Cuts]
    bytes: dict[str, int]


class ArrayWriter:
    """Writes one tree at a time in the background; every process calls each method.

    Args:
      chunk_bytes: arrays of at least so many bytes have files of their own, of at most so many.
    """

    def __init__(self, chunk_bytes: int = pieces.CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._pieces: list[pieces.Piece] = []
        ocp = _orbax()
        self._tree_args = ocp.args.PyTreeSave
        self._barrier = ocp.multihost.get_barrier_sync_fn()
        self._orbax = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(),
            async_options=ocp.AsyncOptions(
                timeout_secs=WRITE_TIMEOUT_SECONDS, create_directories_asynchronously=False
            ),
        )

    def start(self, path: Path, tree: PyTree) -> Whole:
        """Copy the arrays to the host, begin to write the small ones below `path`, and return.

        The caller may donate the arrays as soon as this returns.
        """
        packed = _pack(tree)
        found = {name: pieces.cut(array, self._chunk_bytes) for name, (_, array) in packed.items()}
        cuts = {name: ends for name, ends in found.items() if ends is not None}
        large = [(*packed.pop(name), ends) for name, ends in cuts.items()]
        self._begin(path / ARRAYS, dict(packed.values()))
        self._pieces = [piece for one in large for piece in pieces.copy_pieces(*one)]
        sizes = [pieces.sizes(number, ends, array.dtype) for number, array, ends in large]
        return Whole(cuts, {name: size for one in sizes for name, size in one.items()})

    def _begin(self, path: Path, packed: dict[str, jax.Array]) -> None:
        if packed:
            try:
                self._orbax.save(path, args=self._tree_args(packed))
            except Exception:  # whatever it is goes on; what `wait` would raise of it is taken away
                self._failures()
                raise

    def place(self, path: Path, known: pieces.Known) -> dict[str, FileRecord]:
        """Write this process's blocks of the large arrays below `path`, or link what is known.

        Raises:
          OSError: a file cannot be written.
        """
        held, self._pieces = self._pieces, []
        return pieces.place(path, held, known)

    def wait(self) -> None:
        """Return when the small arrays of all processes are on disk; raise what went wrong."""
        failures = self._failures()
        if failures:
            raise failures[0]

    def _failures(self) -> list[Exception]:
        """Fetch all errors of a save. Orbax raises one at a time, and the rest later."""
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
        """Wait for all processes by the coordination service: safe in a background thread."""
        self._barrier(key=name, timeout_ms=WRITE_TIMEOUT_SECONDS * 1000)

    def close(self) -> None:
        """Stop orbax's threads."""
        self._orbax.close()


def load_arrays(path: Path, manifest: Manifest, target: PyTree) -> PyTree:
    """The tree of the checkpoint at `path`, with the structure and shardings of `target`.

    Every process calls it. What `target` has not is left. Shapes and dtypes must have been compared
    before; what goes beyond them, on disk or in `target`, are zeros that fill up shards.
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
            loaded[number] = pieces.load(path, number, large[number], leaf)
        elif not leaf.size:
            loaded[number] = jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)
    leaves = [_unpack(pieces.owned(loaded.pop(numbers[name])), saved[name]) for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(target), leaves)


def _load_packed(
    path: Path, stored: dict[str, jax.ShapeDtypeStruct], *, whole: bool
) -> dict[str, jax.Array]:
    """Arrays by number from what orbax wrote; `whole` says that it wrote no others."""
    ocp = _orbax()
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
    """Shape and dtype of the array on disk for a leaf of the target."""
    assert leaf.sharding is not None, f"a target leaf {leaf} has no sharding"
    if record.key_impl is None:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=leaf.sharding)


def _unpack(array: jax.Array, record: LeafRecord) -> jax.Array:
    if record.key_impl is None:
        return array
    return jax.random.wrap_key_data(array, impl=record.key_impl)
