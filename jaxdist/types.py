"""Types of trees and documents.

jax has no static type of a pytree, and Python has none of a JSON value: most of these aliases are
`Any` to a type checker, and only inform the reader. This module imports neither jax nor jaxdist.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

PyTree: TypeAlias = Any
"""Nested containers that jax knows (dicts, lists, dataclasses, NNX states), or one bare leaf."""
Leaf: TypeAlias = Any
"""A leaf of a tree: an array, a `jax.ShapeDtypeStruct`, or a Python scalar."""
Params: TypeAlias = Any
"""The trained arrays of a model, or their shapes: usually nested dicts with string keys."""
Buffers: TypeAlias = Any
"""Arrays that a model keeps but does not train, such as batch statistics; a tree like `Params`."""
Grads: TypeAlias = Any
"""Gradients: the structure of `Params`."""
Updates: TypeAlias = Any
"""An optimizer's additions to the parameters, or transformed gradients: the structure of
`Params`."""
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
"""Keyword arguments of a function whose signature is not known."""
JsonObject: TypeAlias = dict[str, Any]
"""An object of a JSON or YAML document."""
TreeDef: TypeAlias = Any
"""A `jax.tree_util.PyTreeDef`, the structure of a tree, which type checkers do not know."""
Dims: TypeAlias = tuple[str | None, ...]
"""The logical dims of an array: a name for each dim, or None for a dim without a name."""
Json: TypeAlias = Any
"""A value of a JSON or YAML document: null, bool, number, string, list or object."""
Annotation: TypeAlias = Any
"""The type in an annotation: a class, a union, `Annotated[...]`."""
TreeT = TypeVar("TreeT")
"""The type of a tree that a function returns with the structure of its argument."""
