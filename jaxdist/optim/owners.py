"""The parameter that each leaf of an optimizer's state belongs to, and its dims that the leaf has.

Moments are shaped like their parameter. Other optimizers keep a part of it (Adafactor's means over
rows and over columns, a norm), several copies (L-BFGS), or something else. The sharding of a leaf,
and the form in which it is stored, follow from the parameter's dims that the leaf still has.
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
    """The parameter that a leaf belongs to.

    Attributes:
      name: name of the parameter, '/'-joined.
      dims: for each dim of the leaf, its index among the parameter's dims; None if it is another
        dim or unknown.
    """

    name: str
    dims: tuple[int | None, ...]

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """The leaf's partition spec from the parameter's: split where the parameter is."""
        entries = dict(enumerate(spec))
        return PartitionSpec(*(None if dim is None else entries.get(dim) for dim in self.dims))

    def place_of(self, dim: int | None) -> int | None:
        """Return the leaf's index of a dim of the parameter; None where the leaf lacks it."""
        return self.dims.index(dim) if dim is not None and dim in self.dims else None


def owners(state: OptState, params: Params, stacked: Collection[str] = ()) -> PyTree:
    """Return a tree like an optimizer's state with the `Owner` of each leaf; None where none.

    A leaf belongs to the parameter whose path is part of its own path: optax's states hold trees
    like that of the parameters, with parts missing (`optax.masked`) or replaced.

    Args:
      stacked: names of the parameters whose first dim counts layers; the first dim of the state of
        such a parameter counts layers too (`jaxdist.optim.stacks`).

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
    """Return `owners` of the parameters themselves: each leaf belongs to itself."""
    found = [Owner(name, tuple(range(leaf.ndim))) for name, leaf in flatten_with_names(params)]
    return jax.tree.unflatten(jax.tree.structure(params), found)


def _owner(
    path: str, leaf: Leaf, shapes: Mapping[str, tuple[int, ...]], stacked: Collection[str]
) -> Owner | None:
    keys = path.split("/")
    # The longest name wins, at its last position: keys before the name belong to the state itself.
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
    """Match the dims of a leaf of `shape` to those of a parameter of shape `of`, by length only.

    A leaf has all of the parameter's dims after others, or some of them in order; a dim with
    several possible matches is None.

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
