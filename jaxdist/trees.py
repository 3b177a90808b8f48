"""Names and sizes of the leaves of a pytree, for messages, manifests and reports."""

from __future__ import annotations

import math
from collections.abc import Collection

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from jaxdist.types import Leaf, PyTree


def flatten_with_names(tree: PyTree) -> list[tuple[str, Leaf]]:
    """Flatten a tree to leaves and their paths, in jax's order; empty containers have no leaf.

    A name joins dict keys, dataclass fields, namedtuple fields and positions with '/'. A bare leaf
    is named ''.

    >>> flatten_with_names({"layers": [{"kernel": 1, "bias": 2}], "step": 3})
    [('layers/0/bias', 2), ('layers/0/kernel', 1), ('step', 3)]
    """
    leaves, _ = tree_flatten_with_path(tree)
    return [(keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def divide(tree: PyTree, names: Collection[str], above: str = "") -> tuple[PyTree, PyTree]:
    """Divide nested dictionaries into the leaves without and with one of these names.

    Everything but a dictionary is a leaf; a dictionary without leaves is left out.

    >>> divide({"a": {"x": 1, "y": 2}, "b": 3}, {"a/x", "b"})
    ({'a': {'y': 2}}, {'a': {'x': 1}, 'b': 3})
    """
    # Without names any tree is allowed, not only nested dictionaries.
    if not names:
        return tree, {}
    parts: tuple[dict[str, PyTree], dict[str, PyTree]] = ({}, {})
    for key, node in tree.items():
        name = above + key
        if not isinstance(node, dict):
            parts[name in names][key] = node
            continue
        for part, found in zip(parts, divide(node, names, name + "/"), strict=True):
            if found:
                part[key] = found
    return parts


def join_leaves(some: PyTree, others: PyTree) -> PyTree:
    """Invert `divide`, with keys in jax's order.

    >>> join_leaves({"a": {"y": 2}}, {"a": {"x": 1}, "b": 3})
    {'a': {'x': 1, 'y': 2}, 'b': 3}
    """
    if not others:
        return some
    found = {**others, **some}
    for key in some.keys() & others.keys():
        found[key] = join_leaves(some[key], others[key])
    return {key: found[key] for key in sorted(found)}


def pattern_of(name: str) -> str:
    """Replace each list position in a name by `*`, so that similar leaves get the same name.

    >>> pattern_of("blocks/3/attention/kernel")
    'blocks/*/attention/kernel'
    """
    return "/".join("*" if part.isdecimal() else part for part in name.split("/"))


def leaf_bytes(leaf: Leaf) -> int:
    """Return the bytes of an array or `jax.ShapeDtypeStruct` over all devices, without replicas.

    A Python scalar counts as the array that jax makes of it, and a random key as its words.
    """
    shape = jnp.shape(leaf)
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return math.prod(shape) * dtype.itemsize


def tree_bytes(tree: PyTree) -> int:
    """Return the bytes of all leaves together (replicas and padding not counted).

    >>> tree_bytes({"w": jax.ShapeDtypeStruct((2, 3), "bfloat16"), "n": None})
    12
    """
    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def tree_size(tree: PyTree) -> int:
    """Return the number of elements of all leaves together: the parameter count of a model.

    >>> tree_size({"w": jax.ShapeDtypeStruct((2, 3), "float32"), "b": 1.0})
    7
    """
    return sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree))
