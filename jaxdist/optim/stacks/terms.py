"""The terms of traced functions, by which two functions are compared without running them.

A *term* describes how a value is computed from the inputs, and two values with the same term are
equal. Sums of single numbers are compared regardless of their order, and a sum over a stack of
layers has the same term as the sum of the sums of its layers. The norm over all parameters
therefore has the same term for stacks and for lists of layers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

Term: TypeAlias = int
"""The number of a term in a `TermTable`; equal terms have equal numbers."""

_ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt",
    "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "cosh", "div", "eq",
    "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow",
    "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul",
    "ne", "neg", "nextafter", "not", "or", "pow", "real", "imag", "reduce_precision", "rem",
    "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient",
    "sub", "tan", "tanh", "xor",
))  # fmt: skip
"""The primitives that compute each element of the result only from the elements with the same index
in the arguments."""
_SUMS = {"reduce_sum": "add", "reduce_max": "max", "reduce_min": "min", "reduce_and": "and",
         "reduce_or": "or"}  # fmt: skip
"""For each primitive that reduces an array, the primitive that combines the results of two
parts."""
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint")
"""The primitives that call a function exactly once, with the arguments of the primitive."""


class UnknownError(Exception):
    """The error for a stack of layers in an operation that no term describes."""


@dataclass(frozen=True)
class TermValue:
    """The terms of a traced variable.

    Attributes:
      layers: the term of each layer of a stack, or a single term for any other variable.
      stacked: whether the variable is a stack, whose first dim counts the layers.
      uniform: whether all elements are equal, so that the term does not depend on the shape.
    """

    layers: tuple[Term, ...]
    stacked: bool = False
    uniform: bool = False


class TermTable:
    """A table of terms, which gives equal terms equal numbers."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Term] = {}
        self._parts: dict[Term, tuple[str, tuple[Term, ...]]] = {}

    def symbol(self, name: Hashable) -> Term:
        """Return the term of the input that `name` identifies; equal names give equal terms."""
        return self._number(("input", name))

    def results(self, closed: ClosedJaxpr, inputs: Sequence[TermValue]) -> list[TermValue]:
        """Return the terms of each result of a traced function, given the terms of its inputs.

        Raises:
          UnknownError: a stack of layers is passed to an operation that may mix its layers.
        """
        jaxpr = closed.jaxpr
        known: dict[Var, TermValue] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
            known[var] = self._constant(const)
        for equation in jaxpr.eqns:
            given = [self._value(known, var) for var in equation.invars]
            known.update(zip(equation.outvars, self._of(equation, given), strict=True))
        return [self._value(known, var) for var in jaxpr.outvars]

    def _value(self, known: dict[Var, TermValue], var: Var | Literal) -> TermValue:
        return self._constant(var.val) if isinstance(var, Literal) else known[var]

    def _constant(self, value: Any) -> TermValue:
        try:
            array = np.asarray(value)
            key = (str(array.dtype), array.shape, array.tobytes())
        except Exception:  # A traced value has no bytes, so it equals only itself.
            return TermValue((self._number(("const", id(value))),))
        return TermValue((self._number(key),), uniform=array.ndim == 0)

    def _of(self, equation: JaxprEqn, given: Sequence[TermValue]) -> list[TermValue]:
        name = equation.primitive.name
        body = _body(equation) if name in _CALLS else None
        if body is not None:
            return self.results(body, given)
        if name == "cond" and not given[0].stacked:
            return self._conditional(equation, given)
        shapes = [_shape(var) for var in equation.invars]
        if name == "broadcast_in_dim" and given[0].uniform:
            return [given[0]]
        if name in _SUMS and len(equation.params["axes"]) == len(shapes[0]):
            return [self._reduced(_SUMS[name], given[0], shapes[0])]
        if name in _ELEMENTWISE:
            return [self._elementwise(equation, given)]
        if any(value.stacked for value in given):
            raise UnknownError(name)
        key = (name, _key(equation), tuple(shapes), tuple(value.layers[0] for value in given))
        return [
            TermValue((self._number((*key, at)),), uniform=not _shape(var))
            for at, var in enumerate(equation.outvars)
        ]

    def _elementwise(self, equation: JaxprEqn, given: Sequence[TermValue]) -> TermValue:
        stacked = any(value.stacked for value in given)
        if stacked and not all(value.stacked or value.uniform for value in given):
            raise UnknownError(equation.primitive.name)
        name, key = equation.primitive.name, _key(equation)
        shape = _shape(equation.outvars[0])
        uniform = not shape or all(value.uniform for value in given)
        single = uniform or (stacked and len(shape) == 1)
        found: list[Term] = []
        for layer in range(max(len(value.layers) for value in given)):
            terms = [value.layers[layer if value.stacked else 0] for value in given]
            join = single and name in _SUMS.values()
            found.append(self._sum(name, terms) if join else self._number((name, key, *terms)))
        return TermValue(tuple(found), stacked, uniform)

    def _conditional(self, equation: JaxprEqn, given: Sequence[TermValue]) -> list[TermValue]:
        """Return the terms of a conditional's results, which combine the terms of all branches."""
        branches = [self.results(_closed(b), given[1:]) for b in equation.params["branches"]]
        found: list[TermValue] = []
        for values in zip(*branches, strict=True):
            stacked = any(value.stacked for value in values)
            uniform = all(value.uniform for value in values)
            if stacked and not all(value.stacked or value.uniform for value in values):
                raise UnknownError("cond")
            terms = [
                self._number(
                    ("cond", given[0].layers[0], *(v.layers[at % len(v.layers)] for v in values))
                )
                for at in range(max(len(value.layers) for value in values))
            ]
            found.append(TermValue(tuple(terms), stacked, uniform))
        return found

    def _reduced(self, join: str, value: TermValue, shape: tuple[int, ...]) -> TermValue:
        """Return the term of the reduction of all elements to a single number."""
        # All elements of a uniform value have the same term, whatever its shape. Their sum depends
        # on the number of elements, so the key contains the shape.
        key = ("reduce", join, shape if value.uniform else None)
        parts = [self._number((*key, term)) for term in value.layers]
        return TermValue((self._sum(join, parts),), uniform=True)

    def _sum(self, join: str, terms: Sequence[Term]) -> Term:
        """Return the term of a sum of single numbers, regardless of order and brackets."""
        parts: list[Term] = []
        for term in terms:
            joined = self._parts.get(term)
            parts += joined[1] if joined is not None and joined[0] == join else (term,)
        if len(parts) == 1:
            return parts[0]
        found = self._number(("sum", join, tuple(sorted(parts))))
        self._parts[found] = (join, tuple(sorted(parts)))
        return found

    def _number(self, key: Hashable) -> Term:
        return self._known.setdefault(key, len(self._known))


def _body(equation: JaxprEqn) -> ClosedJaxpr | None:
    """Return the jaxpr of the function that a primitive calls, or None if it calls none."""
    found = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if found is None:
        return None
    return _closed(found)


def _closed(jaxpr: Any) -> ClosedJaxpr:
    """Return the jaxpr with its constants; since jax 0.12 every jaxpr includes them."""
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ())


def _shape(var: Any) -> tuple[int, ...]:
    return tuple(var.aval.shape)


def _key(equation: JaxprEqn) -> Hashable:
    """Return a primitive's parameters, without the shardings if the primitive is elementwise."""
    shapeless = ("sharding", "out_sharding") if equation.primitive.name in _ELEMENTWISE else ()
    return tuple(
        (name, _plain(value))
        for name, value in sorted(equation.params.items())
        if name not in shapeless
    )


def _plain(value: Any) -> Hashable:
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    inner = getattr(value, "jaxpr", value)
    if isinstance(inner, Jaxpr) and getattr(value, "consts", ()):
        return ("with constants", id(value))
    return str(value)
