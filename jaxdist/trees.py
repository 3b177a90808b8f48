"""Functions on the names and sizes of the leaves of a pytree."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path

from jaxdist.types import Leaf, PyTree


def flatten_with_names(tree: PyTree) -> list[tuple[str, Leaf]]:
    """Return the leaves of a tree with their names, in the order of `jax.tree.leaves`.

    A name is the path of the leaf: dict keys, names of fields and list indices, joined by '/'. A
    tree that is a single leaf has the name ''.

    >>> flatten_with_names({"layers": [{"kernel": 1, "bias": 2}], "step": 3})
    [('layers/0/bias', 2), ('layers/0/kernel', 1), ('step', 3)]
    """
    leaves, _ = tree_flatten_with_path(tree)
    return [(keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def map_with_names(function: Callable[..., Any], tree: PyTree, *others: PyTree) -> PyTree:
    """Call a function with each leaf's name and its values in all trees; return a tree of results.

    >>> map_with_names(lambda name, leaf: f"{name} is {leaf}", {"step": 3})
    {'step': 'step is 3'}
    """
    return tree_map_with_path(
        lambda path, *leaves: function(keystr(path, simple=True, separator="/"), *leaves),
        tree,
        *others,
    )


def divide(tree: PyTree, names: Collection[str], above: str = "") -> tuple[PyTree, PyTree]:
    """Divide nested dictionaries into a tree of the leaves not in `names`, and a tree of the rest.

    Every value that is not a dictionary is a leaf. A dictionary without leaves is left out.

    Args:
      tree: the nested dictionaries.
      names: the names of the leaves of the second tree, as in `flatten_with_names`.
      above: the prefix of all names in `tree`.

    >>> divide({"a": {"x": 1, "y": 2}, "b": 3}, {"a/x", "b"})
    ({'a': {'y': 2}}, {'a': {'x': 1}, 'b': 3})
    """
    # Without names to take out, `tree` may be any pytree, and not only nested dictionaries.
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
    """Join the two trees that `divide` returns to one tree, with sorted keys.

    >>> join_leaves({"a": {"y": 2}}, {"a": {"x": 1}, "b": 3})
    {'a': {'x': 1, 'y': 2}, 'b': 3}
    """
    if not others:
        return some
    found = {**others, **some}
    for key in some.keys() & others.keys():
        found[key] = join_leaves(some[key], others[key])
    return {key: found[key] for key in sorted(found)}


def change_some(
    function: Callable[[list[Any]], Sequence[Any]], leaves: Sequence[Any], places: Sequence[int]
) -> list[Any]:
    """Return all leaves, where one call of `function` has replaced the leaves at `places`.

    >>> change_some(lambda some: [sum(some), 0], ["a", 1, 2], [1, 2])
    ['a', 3, 0]
    """
    found = list(leaves)
    if places:
        changed = function([leaves[i] for i in places])
        for i, leaf in zip(places, changed, strict=True):
            found[i] = leaf
    return found


def wide(tree: PyTree) -> PyTree:
    """Convert floating leaves to float32 or wider, for sums of many terms."""

    def one(x: jax.Array) -> jax.Array:
        floating = jnp.issubdtype(x.dtype, jnp.inexact)
        return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if floating else x

    return jax.tree.map(one, tree)


def pattern_of(name: str) -> str:
    """Replace each list index in a name by `*`, so that similar leaves have the same pattern.

    >>> pattern_of("blocks/3/attention/kernel")
    'blocks/*/attention/kernel'
    """
    return "/".join("*" if part.isdecimal() else part for part in name.split("/"))


def leaf_bytes(leaf: Leaf) -> int:
    """Return the number of bytes of an array or of a `jax.ShapeDtypeStruct`.

    For a sharded array this is the number of bytes of all shards, without replicas. A Python scalar
    has the size of the array to which jax converts it, and a random key has the size of its words.
    """
    shape = jnp.shape(leaf)
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return math.prod(shape) * dtype.itemsize


def tree_bytes(tree: PyTree) -> int:
    """Return the number of bytes of all leaves together, without replicas and padding.

    >>> tree_bytes({"w": jax.ShapeDtypeStruct((2, 3), "bfloat16"), "n": None})
    12
    """
    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def tree_size(tree: PyTree) -> int:
    """Return the number of elements of all leaves together, such as the parameters of a model.

    >>> tree_size({"w": jax.ShapeDtypeStruct((2, 3), "float32"), "b": 1.0})
    7
    """
    return sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree))
