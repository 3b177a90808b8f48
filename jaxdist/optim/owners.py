"""The owner of each leaf of an optimizer's state: the parameter to which the leaf belongs.

Moments have the shape of their parameter. Some optimizers keep leaves with only some of the
parameter's dims (Adafactor's means over rows and over columns, a norm), several copies (L-BFGS), or
other shapes. The sharding of a leaf, and the form in which the leaf is stored, follow from the dims
that the leaf shares with its parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec

from jaxdist.trees import flatten_with_names, map_with_names
from jaxdist.types import Leaf, OptState, Params, PyTree


@dataclass(frozen=True)
class Owner:
    """The parameter to which a leaf belongs, and the dims that leaf and parameter share.

    Attributes:
      name: the '/'-joined name of the parameter.
      dims: for each dim of the leaf, the index of the same dim in the parameter. The entry is None
        if the parameter lacks the dim, or if the dim could be any of several dims of the parameter.
    """

    name: str
    dims: tuple[int | None, ...]

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Return the leaf's partition spec, given the parameter's partition spec."""
        entries = dict(enumerate(spec))
        return PartitionSpec(*(None if dim is None else entries.get(dim) for dim in self.dims))

    def place_of(self, dim: int | None) -> int | None:
        """Return the index that dim `dim` of the parameter has in the leaf.

        The result is None if the leaf lacks the dim.
        """
        return self.dims.index(dim) if dim is not None and dim in self.dims else None


def owners(state: OptState, params: Params, stacked: Collection[str] = ()) -> PyTree:
    """Return a tree like an optimizer's state, with the `Owner` of each leaf.

    The owner of a leaf that belongs to no parameter is None.

    A leaf belongs to the parameter whose path is part of the leaf's path. The reason is that
    optax's states hold trees like the tree of parameters, in which some parts may be missing
    (`optax.masked`) or replaced.

    Args:
      state: the state, or its shapes.
      params: the parameters, or their shapes.
      stacked: the names of the parameters whose first dim counts layers. Each leaf that belongs to
        such a parameter also begins with a dim of layers (`jaxdist.optim.stacks`).

    >>> w = jax.ShapeDtypeStruct((4, 3), "float32")
    >>> mean = jax.ShapeDtypeStruct((3,), "float32")
    >>> found = owners({"step": 0, "mu": {"w": w}, "column": {"w": mean}}, {"w": w})
    >>> found["step"], found["mu"]["w"].dims, found["column"]["w"].dims
    (None, (0, 1), (1,))
    """
    shapes = {name: tuple(leaf.shape) for name, leaf in flatten_with_names(params)}
    return map_with_names(lambda path, leaf: _owner(path, leaf, shapes, stacked), state)


def of_params(params: Params) -> PyTree:
    """Return a tree like the parameters, in which each parameter is its own owner."""
    return map_with_names(lambda name, leaf: Owner(name, tuple(range(leaf.ndim))), params)


def _owner(
    path: str, leaf: Leaf, shapes: Mapping[str, tuple[int, ...]], stacked: Collection[str]
) -> Owner | None:
    keys = path.split("/")
    # The parameter with the longest name is selected, at its last position in the path: the keys of
    # the state come before it, and may equal the name of a parameter by chance.
    for length in range(len(keys), -1, -1):
        for first in range(len(keys) - length, -1, -1):
            name = "/".join(keys[first : first + length])
            if name in shapes:
                shape, of = jax.numpy.shape(leaf), shapes[name]
                if name in stacked and shape[:1] == of[:1]:
                    layer = kept_dims(shape[1:], of[1:])
                    return Owner(name, (0, *(None if dim is None else dim + 1 for dim in layer)))
                return Owner(name, kept_dims(shape, of))
    return None


def kept_dims(shape: Sequence[int], of: Sequence[int]) -> tuple[int | None, ...]:
    """Return, for each dim of a leaf, the index of this dim in the leaf's parameter.

    Dims are matched by their lengths. A leaf has either additional dims, followed by all dims of
    the parameter, or only some dims of the parameter, in order. The result has None for a dim with
    no match or with several possible matches.

    Args:
      shape: the shape of the leaf.
      of: the shape of the parameter.

    >>> kept_dims((10, 4, 3), (4, 3)), kept_dims((4, 3), (4, 8, 3)), kept_dims((5, 5), (2, 3))
    ((None, 0, 1), (0, 2), (None, None))
    >>> kept_dims((2, 8), (2, 8, 8))
    (0, None)
    """
    more = len(shape) - len(of)
    if more > 0:
        rest = range(len(of)) if tuple(shape[more:]) == tuple(of) else (None,) * len(of)
        return (*(None,) * more, *rest)
    ways = [
        dims
        for dims in itertools.combinations(range(len(of)), len(shape))
        if all(of[dim] == length for dim, length in zip(dims, shape, strict=True))
    ]
    if not ways:
        return (None,) * len(shape)
    return tuple(dims[0] if len(set(dims)) == 1 else None for dims in zip(*ways, strict=True))
