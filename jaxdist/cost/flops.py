"""The FLOPs of a jaxpr, and the bytes of its products: counts for a program before compilation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxdist.hlo.flops import valid_pairs
from jaxdist.jaxprs import inner_jaxprs


def jaxpr_flops(jaxpr: Jaxpr | ClosedJaxpr, *, elementwise: bool = False) -> float:
    """Return the FLOPs of all `dot_general` and `conv_general_dilated`, 2 for each multiply-add.

    The body of a scan is multiplied by the scan's length, and a `cond` counts as its most expensive
    branch.

    Args:
      jaxpr: the program.
      elementwise: whether other operations count too, as one FLOP for each element of a result.

    >>> import jax
    >>> jaxpr_flops(jax.make_jaxpr(lambda a, b: a @ b)(*[jax.numpy.ones((4, 4))] * 2))
    128.0
    """
    equations = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return sum(_flops(equation, elementwise) for equation in equations)


def product_bytes(jaxpr: Jaxpr | ClosedJaxpr, *, scans: bool = True) -> float:
    """Return the bytes of the factors and results of all products and convolutions.

    An array counts once, even if several products use it. The body of a scan is multiplied by the
    scan's length, and a `cond` counts as its most expensive branch.

    Args:
      jaxpr: the program.
      scans: whether the bodies of scans count.

    >>> import jax
    >>> product_bytes(jax.make_jaxpr(lambda a, b: a @ b)(*[jax.numpy.ones((4, 4))] * 2))
    192.0
    """
    arrays: dict[Any, int] = {}
    inside = 0.0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            for var in (*equation.invars, *equation.outvars):
                aval: Any = var.aval
                arrays[id(var)] = math.prod(aval.shape) * aval.dtype.itemsize
            continue
        if scans or equation.primitive.name != "scan":
            inside += _inside(equation, partial(product_bytes, scans=scans))
    return inside + sum(arrays.values())


def scanned_results(jaxpr: Jaxpr | ClosedJaxpr) -> list[bool]:
    """Return, for each result of a jaxpr, whether a scan makes it.

    A result of a called function counts as made by a scan if a scan in this function makes it.

    >>> import jax
    >>> def both(x): return jax.lax.scan(lambda x, _: (x, x), x, length=3)[1], x + 1
    >>> scanned_results(jax.make_jaxpr(jax.jit(both))(1.0))
    [True, False]
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    made: set[int] = set()
    for equation in inner.eqns:
        results = equation.outvars
        if equation.primitive.name == "scan":
            made.update(map(id, results))
            continue
        for part in inner_jaxprs(equation):
            if len(part.outvars) == len(results):
                found = zip(results, scanned_results(part), strict=True)
                made.update(id(var) for var, scanned in found if scanned)
    return [id(var) in made for var in inner.outvars]


def _flops(equation: JaxprEqn, elementwise: bool) -> float:
    name = equation.primitive.name
    if name == "dot_general":
        return _dot_flops(equation)
    if name == "conv_general_dilated":
        return _convolution_flops(equation)
    if [*inner_jaxprs(equation)] or not elementwise or name in ("sharding_constraint", "name"):
        return _inside(equation, partial(jaxpr_flops, elementwise=elementwise))
    return float(sum(math.prod(_shape(var)) for var in equation.outvars))


def _inside(equation: JaxprEqn, count: Callable[[Any], float]) -> float:
    """Return the number that a function counts in the programs that an equation calls.

    The body of a scan is multiplied by the scan's length, and a `cond` counts as its most expensive
    branch.
    """
    inner, name = [count(part) for part in inner_jaxprs(equation)], equation.primitive.name
    total = max(inner) if name == "cond" else sum(inner)
    return total * equation.params["length"] if name == "scan" else total


def _shape(var: Any) -> tuple[int, ...]:
    """Return the shape of a variable or literal of a jaxpr."""
    return var.aval.shape


def _dot_flops(equation: JaxprEqn) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = _shape(equation.invars[0])
    out = _shape(equation.outvars[0])
    return 2.0 * math.prod(out) * math.prod(left[dim] for dim in contracted)


def _convolution_flops(equation: JaxprEqn) -> float:
    params = equation.params
    numbers = params["dimension_numbers"]
    left, kernel = map(_shape, equation.invars)
    out = _shape(equation.outvars[0])
    pairs = [
        valid_pairs(
            left[numbers.lhs_spec[2 + i]],
            kernel[numbers.rhs_spec[2 + i]],
            out[numbers.out_spec[2 + i]],
            params["window_strides"][i],
            params["padding"][i][0],
            params["lhs_dilation"][i],
            params["rhs_dilation"][i],
        )
        for i in range(len(out) - 2)
    ]
    batch, features = (out[numbers.out_spec[i]] for i in (0, 1))
    per_position = batch * features * kernel[numbers.rhs_spec[1]]
    return 2.0 * per_position * math.prod(pairs)
