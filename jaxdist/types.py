"""Type aliases for trees and documents.

jax has no static type for a pytree, and Python has no static type for a JSON value. Most of these
aliases are therefore `Any` for a type checker, and only inform the reader. This module imports
neither jax nor jaxdist.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

PyTree: TypeAlias = Any
"""A tree of containers that jax knows (dicts, lists, dataclasses, NNX states), or a single leaf."""
Leaf: TypeAlias = Any
"""A leaf of a tree: an array, a `jax.ShapeDtypeStruct`, or a Python scalar."""
Params: TypeAlias = Any
"""The parameters of a model, or their shapes: usually nested dicts with string keys."""
Buffers: TypeAlias = Any
"""The arrays that a model changes in a step but that have no gradients, such as batch statistics:
usually nested dicts with string keys."""
Grads: TypeAlias = Any
"""The gradients of the parameters, a tree with the structure of `Params`."""
Updates: TypeAlias = Any
"""The values that an optimizer adds to the parameters, or transformed gradients: a tree with the
structure of `Params`."""
OptState: TypeAlias = Any
"""The state of an optax transformation."""
Specs: TypeAlias = Any
"""A `jax.sharding.PartitionSpec` for each leaf of a tree, or None if no leaf is split."""
Shardings: TypeAlias = Any
"""A `jax.sharding.Sharding` for each leaf of a tree."""
Masks: TypeAlias = Any
"""A bool for each leaf of a tree."""
Scalar: TypeAlias = Any
"""A number: a Python number, or an array of shape ()."""
Kwargs: TypeAlias = dict[str, Any]
"""The keyword arguments of a function whose signature is not known."""
JsonObject: TypeAlias = dict[str, Any]
"""An object of a JSON or YAML document."""
TreeDef: TypeAlias = Any
"""A `jax.tree_util.PyTreeDef`, the structure of a tree, which type checkers do not know."""
Dims: TypeAlias = tuple[str | None, ...]
"""The logical dims of an array: a name for each dim, or None for a dim without a name."""
Json: TypeAlias = Any
"""A value of a JSON or YAML document: null, bool, number, string, list or object."""
Annotation: TypeAlias = Any
"""A type in an annotation: a class, a union or `Annotated[...]`."""
TreeT = TypeVar("TreeT")
"""A type variable for functions that return a tree of the same type as their argument."""
