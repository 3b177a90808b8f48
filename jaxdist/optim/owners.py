"""The owner of each leaf of an optimizer's state: a parameter, and its dims that the leaf has.

Moments have the shape of their parameter. Some optimizers keep leaves with only a part of its dims
(Adafactor's means over rows and over columns, a norm), several copies (L-BFGS), or other shapes.
The sharding of a leaf, and the form in which it is stored, follow from the dims that it shares with
its parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec

from jaxdist.trees import flatten_with_names
from jaxdist.types import Leaf, OptState, Params, PyTree


@dataclass(frozen=True)
class Owner:
    """The parameter to which a leaf belongs.

    Attributes:
      name: '/'-joined name of the parameter.
      dims: for each dim of the leaf, the index of the parameter's dim that it is, or None for a dim
        that the parameter lacks, or that is ambiguous.
    """

    name: str
    dims: tuple[int | None, ...]

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Derive the leaf's partition spec from that of the parameter, dim by dim."""
        entries = dict(enumerate(spec))
        return PartitionSpec(*(None if dim is None else entries.get(dim) for dim in self.dims))

    def place_of(self, dim: int | None) -> int | None:
        """Return the position of a parameter's dim in the leaf, or None if the leaf lacks it."""
        return self.dims.index(dim) if dim is not None and dim in self.dims else None


def owners(state: OptState, params: Params, stacked: Collection[str] = ()) -> PyTree:
    """Return the `Owner` of each leaf of an optimizer's state, or None, as a tree like the state.

    A leaf belongs to the parameter whose path is part of the leaf's own path: optax's states hold
    trees like the tree of parameters, with parts missing (`optax.masked`) or replaced.

    Args:
      stacked: names of the parameters whose first dim counts layers; the leaves that belong to such
        a parameter then also begin with a dim of layers (`jaxdist.optim.stacks`).

    >>> w = jax.ShapeDtypeStruct((4, 3), "float32")
    >>> mean = jax.ShapeDtypeStruct((3,), "float32")
    >>> found = owners({"step": 0, "mu": {"w": w}, "column": {"w": mean}}, {"w": w})
    >>> found["step"], found["mu"]["w"].dims, found["column"]["w"].dims
    (None, (0, 1), (1,))
    """
    shapes = {name: tuple(leaf.shape) for name, leaf in flatten_with_names(params)}
    found = [_owner(path, leaf, shapes, stacked) for path, leaf in flatten_with_names(state)]
    return jax.tree.unflatten(jax.tree.structure(state), found)


def of_params(params: Params) -> PyTree:
    """Return a tree of owners for the parameters themselves, each of which belongs to itself."""
    found = [Owner(name, tuple(range(leaf.ndim))) for name, leaf in flatten_with_names(params)]
    return jax.tree.unflatten(jax.tree.structure(params), found)


def _owner(
    path: str, leaf: Leaf, shapes: Mapping[str, tuple[int, ...]], stacked: Collection[str]
) -> Owner | None:
    keys = path.split("/")
    # The longest name wins, at its last position in the path: the state's own keys come before it,
    # and may have the name of a parameter by chance.
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
    """Match the dims of a leaf to those of its parameter by their lengths, given both shapes.

    A leaf has either dims of its own followed by all of the parameter's dims, or some of the
    parameter's dims in order. The result has None for a dim with several possible matches.

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
