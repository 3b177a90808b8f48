"""The parameters of a model, read block by block from the tensors of files."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxdist.errors import ConfigError
from jaxdist.interchange.families import Row
from jaxdist.interchange.layouts import WeightLayout
from jaxdist.interchange.tensors import Tensor
from jaxdist.mesh import Device
from jaxdist.trees import flatten_with_names
from jaxdist.types import Dims, Params

LAYER, EXPERT = "{layer}", "{expert}"
_LISTED = 8
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Leaf:
    """A parameter, and the tensors that fill it.

    Attributes:
      shape: shape of the parameter; larger than `filled` where the vocabulary is padded with zeros.
      filled: the shape that the tensors fill.
      tensors: the parameter's tensor, or a tensor for each layer, or for each expert of each layer.
      stacked: whether the parameter's first dim counts layers.
      by_expert: whether the dim that follows counts experts, each of which has its own tensor.
    """

    name: str
    shape: tuple[int, ...]
    filled: tuple[int, ...]
    dtype: np.dtype
    tensors: tuple[Tensor, ...]
    layout: WeightLayout
    stacked: bool
    by_expert: bool = False

    def block(self, index: Index) -> np.ndarray:
        """Read a block of the parameter in `dtype`; only the block's elements are read."""
        ranges = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True)]
        out = np.zeros([end - begin for begin, end in ranges], self.dtype)
        outer = self.stacked + self.by_expert
        inner, filled = ranges[outer:], self.filled[outer:]
        held = [(b, min(e, n)) for (b, e), n in zip(inner, filled, strict=True)]
        # A device may hold padding alone.
        if any(end <= begin for begin, end in held):
            return out
        given = tuple(slice(begin, end) for begin, end in held)
        taken = tuple(slice(0, end - begin) for begin, end in held)
        places = np.arange(len(self.tensors)).reshape(self.filled[:outer])
        for at in itertools.product(*(range(*one) for one in ranges[:outer])):
            tensor = self.tensors[places[at]]
            here = tuple(i - begin for i, (begin, _) in zip(at, ranges[:outer], strict=True))
            target = out[here] if outer else out
            target[taken] = self.layout.read(tensor.open(), filled)[given]
        return out


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
    """Match every parameter with tensors, leaf by leaf, in the order of the parameters.

    Args:
      params: a tree of shapes.
      stacked: names of parameters whose first dim counts layers.
      dims: logical dims of each parameter, by name; the dim "vocab" may be padded.
      rows: tensor and layout of each parameter, by name; rows of other parameters are left out.
      ignored: suffixes of the names of tensors that fill no parameter.
      vocab_size: number of tokens without padding, or None if no dim is padded.
      where: name of the files in messages.

    Raises:
      ConfigError: parameters without a tensor, tensors without a parameter, or shapes that differ;
        the message lists all of them.
    """
    leaves, used, problems = [], dict[tuple[str, int | None], str](), list[str]()
    for name, shape in flatten_with_names(params):
        if name not in rows:
            problems.append(f"{name}{list(shape.shape)}: the table has no row for it")
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
        f"{name}{list(tensor.shape)}: a tensor that fills no parameter"
        for name, tensor in tensors.items()
        if name not in known and not name.endswith(tuple(ignored))
    ]
    if problems:
        more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        listed = "\n  ".join([*problems[:_LISTED], *more])
        raise ConfigError(f"{where} does not fit the model:\n  {listed}")
    return leaves


def names_of(pattern: str, layers: int | None, experts: int | None = None) -> list[str]:
    """Return the names of a parameter's tensors: of each layer, and of each expert in it.

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
        return f"{tensor}: is {list(found.shape)}, and {name} takes {list(wanted)}"
    if not _is_float(found.dtype):
        return f"{tensor}: is {found.dtype}, but {name} takes floating-point numbers"
    return None


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype.name == "bfloat16"


def place(leaf: Leaf, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Read the shards of a parameter that this process's devices hold, and put them there.

    Args:
      shape: shape, dtype and sharding on the devices; a shape beyond the leaf's is filled with
        zeros.
    """
    assert shape.sharding is not None
    indices = shape.sharding.addressable_devices_indices_map(shape.shape)
    alike: dict[str, list[Device]] = {}
    for device, index in indices.items():
        # The text is the key, since slices have no hash before Python 3.12.
        alike.setdefault(str(index), []).append(device)
    held = []
    # A block is read once for all devices that hold it, and only one block is in memory at a time.
    for devices in alike.values():
        index = indices[devices[0]]
        assert index is not None
        block = _within(leaf, index, shape.shape).astype(shape.dtype, copy=False)
        # The block is copied: on a CPU devices would share NumPy's memory, which cannot be donated.
        held += [jax.device_put(block, device, may_alias=False) for device in devices]
        jax.block_until_ready(held[-len(devices) :])
    return jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, held)


def _within(leaf: Leaf, index: Index, shape: tuple[int, ...]) -> np.ndarray:
    """Read a block of a parameter that is padded with zeros to `shape`."""
    ranges = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    held = [(min(b, n), min(e, n)) for (b, e), n in zip(ranges, leaf.shape, strict=True)]
    block = leaf.block(tuple(slice(*one) for one in held))
    more = [(0, e - b - size) for (b, e), size in zip(ranges, block.shape, strict=True)]
    return np.pad(block, more) if any(n for _, n in more) else block
