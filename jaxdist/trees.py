"""What trees hold, as types; names and sizes of their leaves, for messages and reports.

jax has no static type of a pytree. The aliases are `Any` to a type checker; to the reader they say
which tree is meant.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

PyTree: TypeAlias = Any
"""Nested containers that jax knows (dicts, lists, dataclasses, NNX states), or one bare leaf."""
Leaf: TypeAlias = Any
"""One leaf of a tree: an array, a `jax.ShapeDtypeStruct` in its place, or a Python scalar."""
Params: TypeAlias = Any
"""The trained arrays of a model, or their shapes: usually nested dicts with string keys."""
Buffers: TypeAlias = Any
"""Arrays that a model keeps but does not train, such as batch statistics; a tree like `Params`."""
Grads: TypeAlias = Any
"""Gradients: the structure of `Params`."""
Updates: TypeAlias = Any
"""What an optimizer adds to the parameters, or makes of gradients: the structure of `Params`."""
OptState: TypeAlias = Any
"""The state of an optax transformation."""
Specs: TypeAlias = Any
"""A `jax.sharding.PartitionSpec` for each leaf of a tree; None: no leaf is split."""
Shardings: TypeAlias = Any
"""A `jax.sharding.Sharding` for each leaf of a tree."""
Masks: TypeAlias = Any
"""A bool for each leaf of a tree."""
Scalar: TypeAlias = Any
"""A number: a Python one, or an array of shape ()."""
Kwargs: TypeAlias = dict[str, Any]
"""Keyword arguments of a function that is not known here."""
JsonObject: TypeAlias = dict[str, Any]
"""An object of a JSON or YAML document."""
TreeDef: TypeAlias = Any
"""A `jax.tree_util.PyTreeDef`, which type checkers do not know: the structure of a tree."""
TreeT = TypeVar("TreeT")
"""A tree that comes back with the structure that it was given with."""


def flatten_with_names(tree: PyTree) -> list[tuple[str, Leaf]]:
    """The leaves with their paths, in jax's own order; None and empty containers have no leaf.

    A name joins dict keys, dataclass fields, namedtuple fields and positions with '/'. A bare leaf
    is named ''.

    >>> flatten_with_names({"layers": [{"kernel": 1, "bias": 2}], "step": 3})
    [('layers/0/bias', 2), ('layers/0/kernel', 1), ('step', 3)]
    """
    leaves, _ = tree_flatten_with_path(tree)
    return [(keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def pattern_of(name: str) -> str:
    """The name with a `*` in the place of each position in a list: the same for leaves alike.

    >>> pattern_of("blocks/3/attention/kernel")
    'blocks/*/attention/kernel'
    """
    return "/".join("*" if part.isdecimal() else part for part in name.split("/"))


def leaf_bytes(leaf: Leaf) -> int:
    """Bytes of one array or `jax.ShapeDtypeStruct` over all devices, each element counted once.

    A Python scalar counts as the array jax makes of it; a random key as the words that hold it.
    """
    shape = jnp.shape(leaf)
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return math.prod(shape) * dtype.itemsize


def tree_bytes(tree: PyTree) -> int:
    """Bytes of all leaves together (replicas and padding not counted).

    >>> tree_bytes({"w": jax.ShapeDtypeStruct((2, 3), "bfloat16"), "n": None})
    12
    """
    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def tree_size(tree: PyTree) -> int:
    """The number of elements of all leaves together: the parameter count of a model.

    >>> tree_size({"w": jax.ShapeDtypeStruct((2, 3), "float32"), "b": 1.0})
    7
    """
    return sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree))
