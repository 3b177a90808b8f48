"""Detection of the arguments that the loops of a traced function read layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

# Each of these primitives returns its argument, perhaps in another dtype or layout.
_SAME = ("convert_element_type", "copy", "optimization_barrier", "sharding_constraint")


def sliced(jaxpr: Jaxpr) -> set[int]:
    """Return the indices of the arguments that a scan cuts into slices along their first dim.

    The bodies of calls, conditionals and loops are searched too.

    >>> import jax
    >>> add = lambda x, w, b: jax.lax.scan(lambda x, w: (x + w + b, None), x, w)[0]
    >>> sliced(jax.make_jaxpr(add)(1.0, jax.numpy.ones(3), 2.0).jaxpr)
    {1}
    """
    return _sliced(jaxpr, {var: i for i, var in enumerate(jaxpr.invars)})


def _sliced(jaxpr: Jaxpr, origins: Mapping[Var, int]) -> set[int]:
    known, found = dict(origins), set[int]()
    for equation in jaxpr.eqns:
        given = [None if isinstance(v, Literal) else known.get(v) for v in equation.invars]
        if equation.primitive.name in _SAME:
            pairs = zip(equation.outvars, given, strict=True)
            known.update({var: origin for var, origin in pairs if origin is not None})
        for body in _bodies(equation):
            # A conditional and a while loop have other arguments before the arguments of the body.
            own = given[len(given) - len(body.invars) :]
            outside = equation.invars[len(given) - len(body.invars) :]
            found |= _of_body(equation, body, own, outside)
    return found


def _of_body(
    equation: JaxprEqn, body: Jaxpr, given: Sequence[int | None], outside: Sequence[Var | Literal]
) -> set[int]:
    inside, found = dict[Var, int](), set[int]()
    for var, origin, outer in zip(body.invars, given, outside, strict=True):
        if origin is None:
            continue
        # The form of a scan depends on jax's version, but a slice always has one dim fewer.
        if equation.primitive.name == "scan" and _rank(var) < _rank(outer):
            found.add(origin)
        else:
            inside[var] = origin
    return found | _sliced(body, inside)


def _rank(var: Any) -> int:
    return len(var.aval.shape)


def _bodies(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the jaxprs that an equation runs; their inputs are the equation's last arguments."""
    for name, value in equation.params.items():
        if equation.primitive.name == "while" and name != "body_jaxpr":
            continue
        for body in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(body, "jaxpr", body)
            if hasattr(inner, "eqns") and len(inner.invars) <= len(equation.invars):
                yield inner
