"""Three programs for a function of lists of layers, on stacks of them.

The function of the stacks as they are is the cheapest, then its `jax.vmap` over layers; both are
taken only where comparing traces (`jaxdist.optim.stacks.terms`) proves them equal to the function
of the lists, which is the third.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax

from jaxdist.optim.stacks.form import Form
from jaxdist.optim.stacks.terms import Term, Terms, Value
from jaxdist.types import PyTree

Function = Callable[..., PyTree]
"""A function of trees that may hold lists of layers, to such a tree."""
Listed = Callable[[int | None], Sequence[PyTree]]
"""From a number of layers, or None for each stack's own, to the arguments' shapes in lists."""
Call = Callable[..., PyTree]
"""The same function, from trees of stacks to a tree of stacks."""
COMPARED = 2
"""Layers of the lists that are traced for a comparison: enough to tell one from another."""


def choose(function: Function, listed: Listed, shapes: Sequence[PyTree]) -> Call:
    """The cheapest program that is proven to be right.

    Args:
      listed: see `Listed`.
      shapes: of the arguments, with stacks.
    """
    lists = listed(COMPARED)
    forms = tuple(map(Form.of, lists))
    pairs = zip(forms, lists, shapes, strict=True)
    # Not where a shape depends on the number of layers (all parameters in one vector).
    if all(_shapes(f.pick(x, 0)) == _shapes(f.layer_shapes(own)) for f, x, own in pairs):
        compared = _Comparison(function, forms, tuple(shapes))
        if compared.plain():
            return function
        if compared.alike():
            return compared.mapped

    def in_lists(*given: PyTree) -> PyTree:
        own = zip(map(Form.of, listed(None)), given, strict=True)
        found = function(*(form.unstack(tree) for form, tree in own))
        return Form.of(found).stack(found)

    return in_lists


def _shapes(tree: PyTree) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in jax.tree.leaves(tree)]


@dataclass(frozen=True)
class _Results:
    """The results of a trace on lists of layers.

    Attributes:
      shapes: of one layer's results, in a tree without lists.
      terms: for each layer, those of its results.
    """

    form: Form
    shapes: PyTree
    terms: tuple[list[Term], ...]


@dataclass(frozen=True)
class _Comparison:
    """A function of lists, traced, against the same function of stacks and of single layers."""

    function: Function
    forms: tuple[Form, ...]
    shapes: tuple[PyTree, ...]
    terms: Terms = field(default_factory=Terms)

    @cached_property
    def stacked(self) -> list[bool]:
        """For each leaf of the arguments, whether it is a stack."""
        return [flag for form in self.forms for flag in form.stacked]

    def symbols(self, layer: int) -> list[Term]:
        """For each leaf of the arguments the term of a layer, or of the leaf if it has none."""
        return [
            self.terms.symbol((at, layer if flag else None)) for at, flag in enumerate(self.stacked)
        ]

    def lists(self, layers: Sequence[PyTree]) -> list[PyTree]:
        """The arguments as lists, from those of each layer."""
        given = zip(self.forms, *layers, strict=True)
        return [form.join(trees) for form, *trees in given]

    def results(self, layers: Sequence[int]) -> _Results:
        """Trace the function on a list of these layers."""
        single = [form.layer_shapes(x) for form, x in zip(self.forms, self.shapes, strict=True)]
        given = self.lists([single] * len(layers))
        traced, shapes = jax.make_jaxpr(self.function, return_shape=True)(*given)
        structure = jax.tree.structure(self.shapes)
        symbols = self.lists([structure.unflatten(self.symbols(layer)) for layer in layers])
        leaves = zip(jax.tree.leaves(symbols), jax.tree.leaves(given), strict=True)
        found = self.terms.results(
            traced, [Value((term,), uniform=not shape.shape) for term, shape in leaves]
        )
        form = Form.of(shapes)
        terms = jax.tree.structure(shapes).unflatten([value.layers[0] for value in found])
        parts = (jax.tree.leaves(form.pick(terms, at)) for at in range(len(layers)))
        return _Results(form, form.pick(shapes, 0), tuple(parts))

    @cached_property
    def wanted(self) -> _Results:
        """The results for a list of layers, which all other programs must equal."""
        return self.results(range(COMPARED))

    def plain(self) -> bool:
        """Return whether the function of stacks gives stacks of what it gives for a list."""
        layers = zip(self.stacked, *map(self.symbols, range(COMPARED)), strict=True)
        leaves = zip(layers, jax.tree.leaves(self.shapes), strict=True)
        given = [
            Value(tuple(terms) if flag else (terms[0],), flag, uniform=not shape.shape)
            for (flag, *terms), shape in leaves
        ]
        try:
            traced, shapes = jax.make_jaxpr(self.function, return_shape=True)(*self.shapes)
            found = self.terms.results(traced, given)
        # The state is of single layers, which a rule by the number of dims may fail on in any way.
        except Exception:
            return False
        if jax.tree.structure(shapes) != jax.tree.structure(self.wanted.shapes):
            return False
        return all(
            (len(shape.shape), shape.shape[flag:]) == (len(layer.shape) + flag, layer.shape)
            and shape.dtype == layer.dtype
            and (value.stacked == flag or value.uniform)
            and terms == [*(value.layers if value.stacked else value.layers * COMPARED)]
            for shape, value, flag, layer, *terms in zip(
                jax.tree.leaves(shapes),
                found,
                self.wanted.form.stacked,
                jax.tree.leaves(self.wanted.shapes),
                *self.wanted.terms,
                strict=True,
            )
        )

    def alike(self) -> bool:
        """Return whether each layer's results are what the function gives for a list of it alone.

        Nothing that is of no layer may then depend on one. Stacks of different lengths cannot be
        mapped together.
        """
        leaves = zip(self.stacked, jax.tree.leaves(self.shapes), strict=True)
        if len({shape.shape[0] for flag, shape in leaves if flag}) > 1:
            return False
        for layer, terms in enumerate(self.wanted.terms):
            found = self.results([layer])
            alike = found.terms[0] == terms and found.form.inner == self.wanted.form.inner
            if not alike or _shapes(found.shapes) != _shapes(self.wanted.shapes):
                return False
        return True

    def mapped(self, *given: PyTree) -> PyTree:
        """The function of lists of one layer, mapped over the layers."""
        form = self.wanted.form

        def one(leaves: list[jax.Array]) -> list[jax.Array]:
            trees = structure.unflatten(leaves)
            return jax.tree.leaves(form.pick(self.function(*self.lists([trees])), 0))

        def axes(stacked: list[bool]) -> list[int | None]:
            return [0 if flag else None for flag in stacked]

        leaves, structure = jax.tree.flatten(given)
        run = jax.vmap(one, in_axes=(axes(self.stacked),), out_axes=axes(form.stacked))
        return jax.tree.structure(self.wanted.shapes).unflatten(run(leaves))
