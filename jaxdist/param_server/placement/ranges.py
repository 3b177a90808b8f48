"""Parameters as what is placed: tensors, whole or cut by rows."""

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
class Tensor:
    """A parameter that is to be placed.

    Attributes:
      name: its path in the tree, '/'-joined.
      rows: the size of its first dim; 1 for a scalar.
      size_bytes: of all its elements.
      divisible: may servers share it by rows? Not where its update looks at all of it (LAMB, LARS).
    """

    name: str
    rows: int
    size_bytes: int
    divisible: bool = True


@dataclass(frozen=True, order=True)
class Range:
    """Rows of a parameter that lie on one server and have one version.

    Attributes:
      name: of the parameter.
      start: the first row.
      stop: the row after the last.
      size_bytes: of these rows.
    """

    name: str
    start: int
    stop: int
    size_bytes: int

    @property
    def key(self) -> str:
        """Its name among all ranges: `kernel[0:128]`."""
        return f"{self.name}[{self.start}:{self.stop}]"


def elementwise(optim: OptimizerConfig) -> bool:
    """Return whether an optimizer updates each element by itself, so that servers may share a
    tensor."""
    return isinstance(optim, AdamWConfig | SgdConfig)


def tensors_of(params: Params, *, divisible: bool = True) -> tuple[Tensor, ...]:
    """The leaves of a tree of parameters, or of their shapes, as tensors to place.

    >>> import jax
    >>> tensors_of({"w": jax.ShapeDtypeStruct((4, 2), "float32")})
    (Tensor(name='w', rows=4, size_bytes=32, divisible=True),)
    """
    return tuple(
        Tensor(name, leaf.shape[0] if leaf.shape else 1, leaf_bytes(leaf), divisible)
        for name, leaf in flatten_with_names(params)
    )


def cut(tensors: Sequence[Tensor], range_bytes: int | None) -> tuple[Range, ...]:
    """The tensors as ranges of at most `range_bytes`, in runs of rows as equal as can be.

    A row is never cut, nor a tensor that is not divisible: their ranges may be larger. What a
    tensor is cut into depends on nothing but itself, so that servers may come and go.

    Args:
      range_bytes: None: every tensor stays whole.

    Raises:
      ConfigError: two tensors of one name, or one without bytes.

    >>> [range.key for range in cut([Tensor("w", 5, 40)], 16)]
    ['w[0:1]', 'w[1:3]', 'w[3:5]']
    """
    seen: set[str] = set()
    found = []
    for tensor in tensors:
        if tensor.name in seen:
            raise ConfigError(f"placement: two parameters are named {tensor.name!r}: rename one")
        if tensor.size_bytes < 1 or tensor.rows < 1:
            raise ConfigError(
                f"placement: parameter {tensor.name!r} has {tensor.rows} rows, "
                f"{tensor.size_bytes} bytes: a server holds no empty parameter; leave it out"
            )
        seen.add(tensor.name)
        found += _rows_of(tensor, range_bytes)
    return tuple(found)


def _rows_of(tensor: Tensor, range_bytes: int | None) -> list[Range]:
    count = 1
    if range_bytes is not None and tensor.divisible:
        count = min(tensor.rows, -(-tensor.size_bytes // range_bytes))
    bounds = [tensor.rows * part // count for part in range(count + 1)]
    row_bytes = tensor.size_bytes // tensor.rows
    return [Range(tensor.name, a, b, (b - a) * row_bytes) for a, b in pairwise(bounds)]
