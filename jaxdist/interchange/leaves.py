"""The parameters of a model, read block by block from the tensors of files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxdist.errors import LINES, ConfigError, some_of
from jaxdist.interchange.family import Row
from jaxdist.interchange.layouts import WeightLayout
from jaxdist.interchange.tensors import Tensor
from jaxdist.mesh import Device
from jaxdist.trees import flatten_with_names
from jaxdist.types import Dims, Params

LAYER, EXPERT = "{layer}", "{expert}"
BUFFERS = "buffers"
"""The prefix of the names of a model's buffers, such as the statistics of batch norms."""
_LISTED = 8
_LINE = 64
"""The number of bytes of a cache line."""
Index = tuple[slice, ...]
Ranges = Sequence[tuple[int, int]]
"""The begin and the end of a block along each dim."""


@dataclass(frozen=True)
class Leaf:
    """A parameter, and the tensors that fill it.

    Attributes:
      name: the name of the parameter.
      shape: the shape of the parameter, which is larger than `filled` if its vocabulary is padded
        with zeros.
      filled: the shape of the part that the tensors fill.
      dtype: the dtype of the parameter.
      tensors: the parameter's tensor, or a tensor for each layer, or for each expert of each layer.
        The tuple is empty if the files have no such tensor; the parameter is then 0.
      layout: the layout of each tensor.
      stacked: whether the parameter's first dim counts layers, each of which has separate tensors.
      by_expert: whether the next dim counts experts, each of which has a separate tensor.
    """

    name: str
    shape: tuple[int, ...]
    filled: tuple[int, ...]
    dtype: np.dtype
    tensors: tuple[Tensor, ...]
    layout: WeightLayout
    stacked: bool
    by_expert: bool = False

    @property
    def order(self) -> tuple[int, ...]:
        """The dims of the parameter in the order of the files, the contiguous dim last.

        >>> tensor = WeightLayout("(H d) D -> D H d")
        >>> shape = 2, 5, 4, 3
        >>> Leaf("w", shape, shape, np.dtype("float32"), (), tensor, stacked=True).order
        (0, 2, 3, 1)
        """
        outer, own = self.stacked + self.by_expert, self.layout.own
        if self.layout.joins:
            return (*range(len(self.shape)),)
        names = [name for dim in self.layout.file for name in dim]
        inner = sorted(range(len(own)), key=lambda i: names.index(own[i][0]))
        return (*range(outer), *(outer + i for i in inner))

    def block(self, index: Index) -> np.ndarray:
        """Return a block of the parameter in `dtype`; only the elements of the block are read."""
        ranges = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True)]
        out = np.zeros([end - begin for begin, end in ranges], self.dtype)
        self.fill([(ranges, out)])
        return out

    def fill(self, blocks: Sequence[tuple[Ranges, np.ndarray]]) -> None:
        """Read several blocks into arrays; each tensor is opened once for all blocks.

        Elements that no tensor fills are not changed.

        Args:
          blocks: the ranges and the array of each block.
        """
        outer = self.stacked + self.by_expert
        inner = self.filled[outer:]
        places = np.arange(len(self.tensors)).reshape(self.filled[:outer] if self.tensors else 0)
        for at, number in np.ndenumerate(places):
            held = [one for one in blocks if _has(one[0][:outer], at)]
            if not held:
                continue
            tensor = self.tensors[number]
            if len(held) == 1 and (all_of := self._in_file_order(tensor, at, *held[0])) is not None:
                tensor.read_into(all_of)
                continue
            whole = self.layout.read(tensor.open(), inner)
            for ranges, out in held:
                here = tuple(i - begin for i, (begin, _) in zip(at, ranges[:outer], strict=True))
                # A device may hold only padding, for which nothing is read.
                ends = [min(e, n) for (_, e), n in zip(ranges[outer:], inner, strict=True)]
                begins = [begin for begin, _ in ranges[outer:]]
                given = tuple(map(slice, begins, ends))
                taken = tuple(slice(max(0, e - b)) for b, e in zip(begins, ends, strict=True))
                target = out[here] if outer else out
                target[taken] = whole[given]

    def _in_file_order(
        self, tensor: Tensor, at: tuple[int, ...], ranges: Ranges, out: np.ndarray
    ) -> np.ndarray | None:
        """Return the view of `out` into which a whole tensor can be read without conversion.

        The result is None if `out` has only a part of the tensor, if the elements of `out` have
        another order than the file, or if elements must be converted.

        Args:
          at: the layer, or the layer and the expert, of the tensor.
          ranges, out: the ranges and the array of the block.
        """
        outer = len(at)
        if tensor.decode is not None or tensor.dtype != out.dtype or self.layout.joins:
            return None
        if [*ranges[outer:]] != [(0, size) for size in self.filled[outer:]]:
            return None
        place = (i - begin for i, (begin, _) in zip(at, ranges[:outer], strict=True))
        here = out[*place] if outer else out
        found = here.transpose([i - outer for i in self.order[outer:]])
        same = found.flags.c_contiguous and found.nbytes == tensor.stored_bytes
        return found if same else None


def _has(ranges: Ranges, at: tuple[int, ...]) -> bool:
    return all(begin <= i < end for i, (begin, end) in zip(at, ranges, strict=True))


def match(
    params: Params,
    stacked: frozenset[str],
    dims: Mapping[str, Dims | None],
    rows: Mapping[str, Row],
    tensors: Mapping[str, Tensor],
    *,
    ignored: Sequence[str] = (),
    vocab_size: int | None = None,
    where: str,
) -> list[Leaf]:
    """Match every parameter with its tensors, and return the leaves in the order of the parameters.

    Args:
      params: the parameters, a tree of shapes.
      stacked: the names of the parameters whose first dim counts layers.
      dims: the logical dims of each parameter, by name, or None for a parameter whose dims have no
        names. The dim "vocab" may be padded.
      rows: the row of each parameter, by name; rows of other parameters are ignored.
      tensors: the tensors of the files, by name.
      ignored: the suffixes of the names of tensors that fill no parameter.
      vocab_size: the number of tokens without padding, or None if no dim is padded.
      where: the name of the files in error messages.

    Raises:
      ConfigError: a parameter has no tensor, a tensor fills no parameter, or shapes differ; the
        message lists these problems.
    """
    leaves, used, problems = [], dict[tuple[str, int | None], str](), list[str]()
    for name, shape in flatten_with_names(params):
        if name not in rows:
            problems.append(f"{name}{list(shape.shape)}: the table has no row for this parameter")
            continue
        row, filled = rows[name], list(shape.shape)
        for i, dim in enumerate(dims.get(name) or ()):
            filled[i] = vocab_size if dim == "vocab" and vocab_size is not None else filled[i]
        by_expert, layered = EXPERT in row.tensor, name in stacked
        own = tuple(filled[layered + by_expert :])
        layout = WeightLayout(row.layout, row.part)
        names = names_of(
            row.tensor, filled[0] if layered else None, filled[layered] if by_expert else None
        )
        found = []
        names = [] if row.absent and not any(one in tensors for one in names) else names
        for one in names:
            problem = _problem(name, one, tensors.get(one), layout, own)
            if (one, row.part) in used:
                problem = f"{one}: fills both {used[one, row.part]} and {name}"
            used[one, row.part] = name
            problems += [problem] if problem else []
            found += [tensors[one]] if one in tensors else []
        leaves.append(
            Leaf(name, shape.shape, tuple(filled), np.dtype(shape.dtype), tuple(found), layout,
                 layered, by_expert)
        )  # fmt: skip
    known = {name for name, _ in used}
    problems += [
        f"{name}{list(tensor.shape)}: this tensor fills no parameter"
        for name, tensor in tensors.items()
        if name not in known and not name.endswith(tuple(ignored))
    ]
    if problems:
        listed = some_of(problems, _LISTED, LINES)
        raise ConfigError(
            f"{where} does not fit the model:\n  {listed}\n"
            "Change the options of the model, or the table of names, until both agree"
        )
    return leaves


def names_of(pattern: str, layers: int | None, experts: int | None = None) -> list[str]:
    """Return the names of a parameter's tensors, layer by layer, and expert by expert in a layer.

    Args:
      pattern: the name, in which `{layer}` and `{expert}` are replaced by numbers.
      layers: the number of layers, or None if the parameter is not stacked.
      experts: the number of experts, or None if the tensor has all experts.

    >>> names_of("h.{layer}.ln.weight", 2)
    ['h.0.ln.weight', 'h.1.ln.weight']
    >>> names_of("h.{layer}.{expert}.up", 1, 2)
    ['h.0.0.up', 'h.0.1.up']
    """
    found = [pattern]
    for mark, count in ((LAYER, layers), (EXPERT, experts)):
        if count is not None:
            found = [name.replace(mark, str(i)) for name in found for i in range(count)]
    return found


def _problem(
    name: str, tensor: str, found: Tensor | None, layout: WeightLayout, own: tuple[int, ...]
) -> str | None:
    try:
        wanted = layout.file_shape(own)
    except ConfigError as error:
        return f"{name}: {error}"
    if found is None:
        return f"{tensor}{list(wanted)}: no such tensor, for {name}"
    if found.shape != wanted:
        return f"{tensor}: has shape {list(found.shape)}, but {name} takes {list(wanted)}"
    if not _is_float(found.dtype):
        return f"{tensor}: has dtype {found.dtype}, but {name} takes floating-point numbers"
    return None


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype.name == "bfloat16"


class Room:
    """A buffer in the host's memory that all leaves share, for blocks that are copied to devices.

    The buffer grows to the size of the largest block. With new memory for each leaf, the operating
    system would fill every page with zeros, which takes as long as the reading.
    """

    def __init__(self, least: int = 0):
        self._bytes = np.empty(0, np.uint8)
        self._grow(least)

    def _grow(self, size: int) -> None:
        self._bytes = np.empty(size + 2 * _LINE, np.uint8)
        # A CPU device would share NumPy memory that begins at a cache line, even against
        # `may_alias` (jax 0.10). Such an array could not be donated, and would change when the
        # buffer is used again. The buffer therefore begins half a cache line later.
        start = -self._bytes.ctypes.data % _LINE + _LINE // 2
        self._bytes = self._bytes[start : start + size]

    @property
    def size(self) -> int:
        """The number of bytes of the buffer."""
        return self._bytes.size

    def arrays(
        self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype, order: Sequence[int]
    ) -> list[np.ndarray]:
        """Return arrays for the first shapes that fit into the buffer, and at least one array.

        The arrays have arbitrary values, and are valid until the next call.

        Args:
          order: the dims in the order of the memory, the contiguous dim last.
        """
        back = np.argsort(order)
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        if sizes[0] > self._bytes.size:
            self._grow(sizes[0])
        found, begin = [], 0
        for shape, size in zip(shapes, sizes, strict=True):
            if begin + size > self._bytes.size:
                break
            held = self._bytes[begin : begin + size].view(dtype)
            found.append(held.reshape([shape[i] for i in order]).transpose(back))
            begin += -(-size // _LINE) * _LINE
        return found


def _arrays(
    blocks: Sequence[Ranges], room: Room, dtype: np.dtype, order: Sequence[int]
) -> list[tuple[Ranges, np.ndarray, list[np.ndarray]]]:
    """Return arrays of the buffer, each with its ranges and with its views for the blocks.

    If the blocks join to one large block that fits into the buffer, there is a single array for
    this block, so that whole tensors can be read. Otherwise each of the first blocks has a separate
    array.
    """
    hull = [(min(b for b, _ in dim), max(e for _, e in dim)) for dim in zip(*blocks, strict=True)]
    joined = math.prod(_shape(hull)) == sum(math.prod(_shape(one)) for one in blocks)
    if joined and math.prod(_shape(hull)) * dtype.itemsize <= room.size:
        (whole,) = room.arrays([_shape(hull)], dtype, order)
        cuts = [
            (..., *(slice(b - o, e - o) for (b, e), (o, _) in zip(one, hull, strict=True)))
            for one in blocks
        ]
        return [(hull, whole, [whole[cut] for cut in cuts])]
    # The arrays keep the order of dims in the files, since NumPy copies ten times faster than it
    # transposes. jax transposes them later, while it copies them to the device.
    arrays = room.arrays([*map(_shape, blocks)], dtype, order)
    return [(one, array, [array]) for one, array in zip(blocks, arrays, strict=False)]


def _shape(ranges: Ranges) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in ranges)


def largest(leaves: Sequence[Leaf]) -> int:
    """Return the bytes of the largest tensor in the dtype of its parameter."""
    sizes = (leaf.dtype.itemsize * math.prod(t.shape) for leaf in leaves for t in leaf.tensors)
    return max(sizes, default=0)


def place(leaf: Leaf, shape: jax.ShapeDtypeStruct, room: Room) -> jax.Array:
    """Read a parameter into the devices of this process, and return the global array.

    Only the shards of these devices are read. A tensor is opened once for all blocks that fit into
    the buffer, and a block is read once for all devices that hold it.

    Args:
      leaf: the parameter to read.
      shape: the shape, dtype and sharding on the devices; elements outside of the leaf's shape are
        0.
      room: the buffer for the blocks.
    """
    assert shape.sharding is not None
    indices = shape.sharding.addressable_devices_indices_map(shape.shape)
    alike: dict[tuple[tuple[int, int], ...], list[Device]] = {}
    for device, index in indices.items():
        assert index is not None
        ranges = [part.indices(size)[:2] for part, size in zip(index, shape.shape, strict=True)]
        alike.setdefault(tuple(ranges), []).append(device)
    padded = not leaf.tensors or leaf.filled != shape.shape
    left, held = [*alike], []
    while left:
        read = _arrays(left, room, np.dtype(shape.dtype), leaf.order)
        blocks = [block for *_, own in read for block in own]
        now, left = left[: len(blocks)], left[len(blocks) :]
        for _, array, _ in read if padded else []:
            array.fill(0)
        leaf.fill([(ranges, array) for ranges, array, _ in read])
        put = [
            jax.device_put(block, device)
            for ranges, block in zip(now, blocks, strict=True)
            for device in alike[ranges]
        ]
        # The buffer may be used again only after the copies are complete, so this function waits
        # for them.
        held += jax.block_until_ready(put)
    return jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, held)
