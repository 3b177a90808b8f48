"""Which parameter each leaf of an optimizer's state belongs to, and which of its dims the leaf has.

Moments are shaped like their parameter. Other optimizers keep less of it (Adafactor's means over
rows and over columns, a norm), several of it in a row (L-BFGS), or something else. Where a leaf
shall lie on the mesh, and in which form it is stored, follows from the parameter's dims that it
still has.
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
      name: the parameter's, '/'-joined.
      dims: for each dim of the leaf, which of the parameter's it is; None is another, or unknown.
    """

    name: str
    dims: tuple[int | None, ...]

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """The leaf's partition spec from the parameter's: split where the parameter is."""
        entries = dict(enumerate(spec))
        return PartitionSpec(*(None if dim is None else entries.get(dim) for dim in self.dims))

    def place_of(self, dim: int | None) -> int | None:
        """Which dim of the leaf is this one of the parameter; None where it has it not."""
        return self.dims.index(dim) if dim is not None and dim in self.dims else None


def owners(state: OptState, params: Params, stacked: Collection[str] = ()) -> PyTree:
    """A tree like an optimizer's state with the `Owner` of each leaf, None where it has none.

    A leaf belongs to the parameter whose path is part of its own: optax's states hold trees like
    that of the parameters, with parts missing (`optax.masked`) or something in a leaf's place.

    Args:
      stacked: names of the parameters whose first dim counts layers; the first dim of what an
        optimizer keeps for one does too (`jaxdist.optim.stacks`).

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
    """`owners` of the parameters themselves: each leaf belongs to itself."""
    found = [Owner(name, tuple(range(leaf.ndim))) for name, leaf in flatten_with_names(params)]
    return jax.tree.unflatten(jax.tree.structure(params), found)


def _owner(
    path: str, leaf: Leaf, shapes: Mapping[str, tuple[int, ...]], stacked: Collection[str]
) -> Owner | None:
    keys = path.split("/")
    # The longest name, and among its places the last: what stands before is the state's own.
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
    """Which dims of a parameter of shape `of` a leaf of `shape` has, from their lengths alone.

    It has all of them behind others, or some of them in their order; a dim that could be this or
    that one is None.

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
