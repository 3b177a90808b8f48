"""Trees in which a list of layers replaces a stack of layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.errors import ConfigError
from jaxdist.types import PyTree, TreeDef


@jax.tree_util.register_pytree_with_keys_class
class Layers:
    """The node of a tree that replaces a stacked parameter: the list of its layers, in order."""

    def __init__(self, layers: Sequence[PyTree]) -> None:
        self.layers = tuple(layers)

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        """Return the layers with their positions as keys."""
        return [(jax.tree_util.SequenceKey(i), x) for i, x in enumerate(self.layers)], None

    @classmethod
    def tree_unflatten(cls, _: None, layers: Sequence[PyTree]) -> Layers:
        """Return a list of these layers: the inverse of `tree_flatten_with_keys`."""
        return cls(layers)


def is_layers(node: object) -> bool:
    """Return whether a node of a tree is a list of layers."""
    return isinstance(node, Layers)


@dataclass(frozen=True)
class Form:
    """The structure of a tree with lists of layers, with methods that convert to stacks and back.

    Attributes:
      outer: the structure of the tree in which a leaf replaces each list.
      inner: for each leaf of `outer`, the structure of a layer of the list, or None if the leaf
        replaces no list.
      counts: for each leaf of `outer`, the number of layers in the list, or 0 if the leaf replaces
        no list.
    """

    outer: TreeDef
    inner: tuple[TreeDef | None, ...]
    counts: tuple[int, ...]

    @staticmethod
    def of(tree: PyTree) -> Form:
        """Return the form of a tree with lists of layers.

        Raises:
          ConfigError: the layers of one stack have different structures, shapes or dtypes.
        """
        nodes, outer = jax.tree.flatten(tree, is_leaf=is_layers)
        for node in nodes:
            if is_layers(node) and len({_signature(layer) for layer in node.layers}) > 1:
                raise ConfigError(
                    "optim: the optimizer treats the layers of a stack differently, by their "
                    "position, but all layers of a stack share one state. Let the optimizer "
                    "distinguish parameters only by name or number of dims, or write the layers "
                    "as a list"
                )
        inner = (jax.tree.structure(n.layers[0]) if is_layers(n) else None for n in nodes)
        counts = (len(node.layers) if is_layers(node) else 0 for node in nodes)
        return Form(outer, tuple(inner), tuple(counts))

    @property
    def stacked(self) -> list[bool]:
        """For each leaf of the tree of stacks, in order, whether the leaf is a stack."""
        return [
            flag
            for inner in self.inner
            for flag in ([False] if inner is None else [True] * inner.num_leaves)
        ]

    def stack(self, tree: PyTree) -> PyTree:
        """Return the tree in which each list of layers is replaced by a stack."""
        return self._map(tree, lambda node, _: jax.tree.map(lambda *x: jnp.stack(x), *node.layers))

    def unstack(self, tree: PyTree) -> PyTree:
        """Return the tree in which each stack is replaced by a list of layers."""

        def listed(node: PyTree, count: int) -> Layers:
            return Layers([jax.tree.map(lambda x, i=i: x[i], node) for i in range(count)])

        return self._map(tree, listed)

    def join(self, trees: Sequence[PyTree]) -> PyTree:
        """Return a tree with lists of layers, given a tree for each layer."""
        nodes = [self.outer.flatten_up_to(tree) for tree in trees]
        return self.outer.unflatten(
            [
                same[0] if inner is None else Layers(same)
                for inner, *same in zip(self.inner, *nodes, strict=True)
            ]
        )

    def pick(self, tree: PyTree, layer: int) -> PyTree:
        """Return the tree in which each list is replaced by its layer with index `layer`."""
        return self._map(tree, lambda node, _: node.layers[layer])

    def layer_shapes(self, tree: PyTree) -> PyTree:
        """Return the shapes of a single layer, given a tree of the shapes of stacks."""

        def cut(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

        return self._map(tree, lambda node, _: jax.tree.map(cut, node))

    def _map(self, tree: PyTree, change: Callable[[PyTree, int], PyTree]) -> PyTree:
        nodes = self.outer.flatten_up_to(tree)
        given = zip(nodes, self.inner, self.counts, strict=True)
        return self.outer.unflatten([n if i is None else change(n, c) for n, i, c in given])


def _signature(layer: PyTree) -> Hashable:
    leaves, structure = jax.tree.flatten(layer)
    return structure, tuple((jnp.shape(x), str(jnp.result_type(x))) for x in leaves)
