"""Three methods to apply a function on lists of layers to stacks of layers.

The first method, which is the cheapest, calls the function on the stacks. The second method is a
`jax.vmap` of the function over layers. The third method unstacks the layers and calls the function
on the lists. The first two methods are used only if a comparison of traces
(`jaxdist.optim.stacks.terms`) proves that they have the results of the third method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax

from jaxdist.optim.stacks.form import Form
from jaxdist.optim.stacks.terms import Term, TermTable, TermValue
from jaxdist.types import PyTree

Function = Callable[..., PyTree]
"""A function from trees to a tree, all of which may hold lists of layers."""
Listed = Callable[[int | None], Sequence[PyTree]]
"""A function that returns the shapes of the arguments, with lists of layers instead of stacks. Its
argument is the number of layers of each list, or None for the number in each stack.
"""
Call = Callable[..., PyTree]
"""A function from trees with stacks of layers to a tree with stacks of layers."""
COMPARED = 2
"""The number of layers that are traced for a comparison; two suffice to distinguish layers."""


def choose(function: Function, listed: Listed, shapes: Sequence[PyTree]) -> Call:
    """Return the cheapest program that is proven to give the results of the function on lists.

    Args:
      function: a function on lists of layers.
      listed: the function from a number of layers to the shapes of the arguments, with lists
        (`Listed`).
      shapes: the shapes of the arguments, with stacks.
    """
    lists = listed(COMPARED)
    forms = tuple(map(Form.of, lists))
    pairs = zip(forms, lists, shapes, strict=True)
    # A shape that depends on the number of layers cannot be compared, such as the shape of a vector
    # of all parameters.
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
      form: the structure of the results, with lists of layers.
      shapes: the shapes of the results for a single layer, in a tree without lists.
      terms: the terms of the results for each layer.
    """

    form: Form
    shapes: PyTree
    terms: tuple[list[Term], ...]


@dataclass(frozen=True)
class _Comparison:
    """A comparison of three traces of a function: on lists, on stacks, and on single layers."""

    function: Function
    forms: tuple[Form, ...]
    shapes: tuple[PyTree, ...]
    terms: TermTable = field(default_factory=TermTable)

    @cached_property
    def stacked(self) -> list[bool]:
        """For each leaf of the arguments, in order, whether the leaf is a stack."""
        return [flag for form in self.forms for flag in form.stacked]

    def symbols(self, layer: int) -> list[Term]:
        """Return the term of each leaf of the arguments.

        For a stack, the term is the term of the layer with index `layer`.
        """
        return [
            self.terms.symbol((at, layer if flag else None)) for at, flag in enumerate(self.stacked)
        ]

    def lists(self, layers: Sequence[PyTree]) -> list[PyTree]:
        """Join the arguments of several layers into arguments with lists of layers."""
        given = zip(self.forms, *layers, strict=True)
        return [form.join(trees) for form, *trees in given]

    def results(self, layers: Sequence[int]) -> _Results:
        """Return the results of a trace of the function on lists of the given layers."""
        single = [form.layer_shapes(x) for form, x in zip(self.forms, self.shapes, strict=True)]
        given = self.lists([single] * len(layers))
        traced, shapes = jax.make_jaxpr(self.function, return_shape=True)(*given)
        structure = jax.tree.structure(self.shapes)
        symbols = self.lists([structure.unflatten(self.symbols(layer)) for layer in layers])
        leaves = zip(jax.tree.leaves(symbols), jax.tree.leaves(given), strict=True)
        found = self.terms.results(
            traced, [TermValue((term,), uniform=not shape.shape) for term, shape in leaves]
        )
        form = Form.of(shapes)
        terms = jax.tree.structure(shapes).unflatten([value.layers[0] for value in found])
        parts = (jax.tree.leaves(form.pick(terms, at)) for at in range(len(layers)))
        return _Results(form, form.pick(shapes, 0), tuple(parts))

    @cached_property
    def wanted(self) -> _Results:
        """The results on lists of layers, which the results of any other program must equal."""
        return self.results(range(COMPARED))

    def plain(self) -> bool:
        """Return whether the results on stacks are proven to equal the results on lists."""
        layers = zip(self.stacked, *map(self.symbols, range(COMPARED)), strict=True)
        leaves = zip(layers, jax.tree.leaves(self.shapes), strict=True)
        given = [
            TermValue(tuple(terms) if flag else (terms[0],), flag, uniform=not shape.shape)
            for (flag, *terms), shape in leaves
        ]
        try:
            traced, shapes = jax.make_jaxpr(self.function, return_shape=True)(*self.shapes)
            found = self.terms.results(traced, given)
        # The state has the structure for single layers, so a rule that depends on the number of
        # dims may raise any exception on stacks.
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
        """Return whether every layer is proven to have the same results without other layers.

        Results that belong to no layer, such as a step count, must be the same for every layer.
        Stacks of different lengths cannot be mapped together.
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
        """Call the function with lists of a single layer, under `jax.vmap` over the layers."""
        form = self.wanted.form

        def one(leaves: list[jax.Array]) -> list[jax.Array]:
            trees = structure.unflatten(leaves)
            return jax.tree.leaves(form.pick(self.function(*self.lists([trees])), 0))

        def axes(stacked: list[bool]) -> list[int | None]:
            return [0 if flag else None for flag in stacked]

        leaves, structure = jax.tree.flatten(given)
        run = jax.vmap(one, in_axes=(axes(self.stacked),), out_axes=axes(form.stacked))
        return jax.tree.structure(self.wanted.shapes).unflatten(run(leaves))
