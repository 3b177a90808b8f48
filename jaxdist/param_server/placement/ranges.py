"""The ranges of rows into which parameters are cut; a range is the unit of placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxdist.errors import ConfigError
from jaxdist.optim.build import AdamWConfig, SgdConfig
from jaxdist.optim.common import OptimizerConfig
from jaxdist.trees import flatten_with_names, leaf_bytes
from jaxdist.types import Params


@dataclass(frozen=True)
class PlaceableTensor:
    """A parameter whose rows a placement assigns to servers.

    Attributes:
      name: the path of the parameter in the tree, joined with '/'.
      rows: the size of the first dim, or 1 for a scalar.
      size_bytes: the number of bytes of all elements.
      divisible: whether several servers may hold rows of the parameter; false if an update reads
        the whole parameter (LAMB, LARS).
    """

    name: str
    rows: int
    size_bytes: int
    divisible: bool = True


@dataclass(frozen=True, order=True)
class Range:
    """The rows of a parameter that one server stores, with a common version.

    Attributes:
      name: the name of the parameter.
      start: the first row.
      stop: the row after the last row.
      size_bytes: the number of bytes of these rows.
    """

    name: str
    start: int
    stop: int
    size_bytes: int

    @property
    def key(self) -> str:
        """The unique name of the range, such as `kernel[0:128]`."""
        return f"{self.name}[{self.start}:{self.stop}]"


def updates_elementwise(optim: OptimizerConfig) -> bool:
    """Return whether an optimizer updates each element independently of all other elements."""
    return isinstance(optim, AdamWConfig | SgdConfig)


def placeable_tensors(params: Params, *, divisible: bool = True) -> tuple[PlaceableTensor, ...]:
    """Return the leaves of a tree of parameters, or of their shapes, as tensors to place.

    >>> import jax
    >>> placeable_tensors({"w": jax.ShapeDtypeStruct((4, 2), "float32")})
    (PlaceableTensor(name='w', rows=4, size_bytes=32, divisible=True),)
    """
    return tuple(
        PlaceableTensor(name, leaf.shape[0] if leaf.shape else 1, leaf_bytes(leaf), divisible)
        for name, leaf in flatten_with_names(params)
    )


def cut_ranges(tensors: Sequence[PlaceableTensor], range_bytes: int | None) -> tuple[Range, ...]:
    """Cut tensors by rows into ranges of at most `range_bytes`, of nearly equal numbers of rows.

    Rows and indivisible tensors are never cut, so their ranges may be larger. The ranges of a
    tensor depend only on that tensor, so they stay the same when servers join or leave.

    Args:
      range_bytes: the size limit of a range; None keeps every tensor whole.

    Raises:
      ConfigError: two tensors have the same name, or a tensor is empty.

    >>> [range.key for range in cut_ranges([PlaceableTensor("w", 5, 40)], 16)]
    ['w[0:1]', 'w[1:3]', 'w[3:5]']
    """
    seen: set[str] = set()
    found = []
    for tensor in tensors:
        if tensor.name in seen:
            raise ConfigError(
                f"placement: two parameters have the name {tensor.name!r}: rename either"
            )
        if tensor.size_bytes < 1 or tensor.rows < 1:
            raise ConfigError(
                f"placement: parameter {tensor.name!r} has {tensor.rows} rows, {tensor.size_bytes} "
                "bytes: servers cannot hold an empty parameter; leave the parameter out"
            )
        seen.add(tensor.name)
        found += _rows_of(tensor, range_bytes)
    return tuple(found)


def _rows_of(tensor: PlaceableTensor, range_bytes: int | None) -> list[Range]:
    count = 1
    if range_bytes is not None and tensor.divisible:
        count = min(tensor.rows, -(-tensor.size_bytes // range_bytes))
    bounds = [tensor.rows * part // count for part in range(count + 1)]
    row_bytes = tensor.size_bytes // tensor.rows
    return [Range(tensor.name, a, b, (b - a) * row_bytes) for a, b in pairwise(bounds)]
