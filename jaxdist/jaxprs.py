"""Functions that visit, analyze, inline and run the equations of jaxprs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

Env = dict[Hashable, jax.Array]
"""A mapping from variables to their values. The values that a `SplitScan` keeps are in the mapping
too, by their names."""


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Yield the jaxprs among an equation's parameters, such as the body of a scan.

    >>> import jax
    >>> program = jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0)
    >>> [inner.eqns[0].primitive.name for inner in inner_jaxprs(program.eqns[0])]
    ['add']
    """
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield inner


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr and of all jaxprs inside it.

    >>> import jax
    >>> program = jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0)
    >>> [equation.primitive.name for equation in equations(program)][-1]
    'add'
    """
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from equations(inner)


def depends_on(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Return, for each result of a jaxpr, whether it may depend on a marked argument.

    The jaxprs inside scans, calls and conditionals are analyzed too. Every result of any other
    operation is assumed to depend on all arguments of the operation.

    Args:
      jaxpr: the traced function.
      inputs: for each argument, whether it is marked.
    """
    marked = {var for var, chosen in zip(jaxpr.invars, inputs, strict=True) if chosen}

    def is_marked(var: Var | Literal) -> bool:
        return not isinstance(var, Literal) and var in marked

    for equation in jaxpr.eqns:
        given = [is_marked(var) for var in equation.invars]
        if any(given):
            found = _results(equation, given)
            marked.update(v for v, own in zip(equation.outvars, found, strict=True) if own)
    return [is_marked(var) for var in jaxpr.outvars]


def _results(equation: JaxprEqn, given: list[bool]) -> list[bool]:
    if equation.primitive.name == "scan":
        return _of_scan(equation, given)
    if equation.primitive.name == "cond" and not given[0]:
        branches = [depends_on(b.jaxpr, given[1:]) for b in equation.params["branches"]]
        return [any(found) for found in zip(*branches, strict=True)]
    called = _body_of_call(equation)
    if called is not None:
        return depends_on(called.jaxpr, given)
    return [True] * len(equation.outvars)


def _of_scan(equation: JaxprEqn, given: list[bool]) -> list[bool]:
    consts, carries = scan_counts(equation)
    while True:
        found = depends_on(equation.params["jaxpr"].jaxpr, given)
        # `zip` stops at the end of the carries, and leaves out the arguments that are cut into
        # slices.
        more = [a or b for a, b in zip(given[consts:], found[:carries], strict=False)]
        if more == given[consts : consts + carries]:
            return found
        given = [*given[:consts], *more, *given[consts + carries :]]


def _body_of_call(equation: JaxprEqn) -> ClosedJaxpr | None:
    """Return the function that an equation calls once on its arguments, or None if it calls none.

    The function is a jitted or rematerialized function, or the rule of a `jax.custom_vjp`, which
    jax calls by `closed_call` and stores as `call_jaxpr`.
    """
    if equation.primitive.name not in ("jit", "pjit", "closed_call", "remat2", "checkpoint"):
        return None
    params = equation.params
    return closed(params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"])


def closed(jaxpr: Any) -> ClosedJaxpr:
    """Return a jaxpr as a closed jaxpr; since jax 0.12 every jaxpr is closed."""
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ())


def scan_counts(equation: JaxprEqn) -> tuple[int, int]:
    """Return the number of constants and the number of carries of a scan.

    The other arguments of a scan are cut into slices. The versions of jax store these numbers in
    different forms, so the shapes are compared instead: a slice has one dim fewer than its array.
    """
    body = equation.params["jaxpr"].jaxpr

    def alike(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        pairs = zip(outside, inside, strict=True)
        return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in pairs)

    carries = alike(equation.outvars, body.outvars)
    return alike(equation.invars, body.invars) - carries, carries


def inlined(whole: ClosedJaxpr) -> ClosedJaxpr:
    """Replace the calls in a function by the equations of the called functions.

    The equations of a called function can then also be divided between the two tasks of a backward
    pass: the gradient of the input, and the gradient of the weights.
    """

    def evaluate(called: ClosedJaxpr, args: Sequence[jax.Array]) -> list[jax.Array]:
        jaxpr = called.jaxpr
        env: Env = dict(
            zip((*jaxpr.constvars, *jaxpr.invars), (*called.consts, *args), strict=True)
        )
        for equation in jaxpr.eqns:
            body = _body_of_call(equation)
            if body is None:
                bind(equation, env)
            else:
                found = evaluate(body, [value(env, var) for var in equation.invars])
                env.update(zip(equation.outvars, found, strict=True))
        return [value(env, var) for var in jaxpr.outvars]

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in whole.in_avals]
    return jax.make_jaxpr(lambda *args: evaluate(whole, args))(*shapes)


def bind(equation: JaxprEqn, env: Env) -> None:
    """Run an equation on the values in `env`, and add its results to `env`.

    The equation runs as the only equation of a jaxpr, in the context (such as a mesh) in which it
    was traced. `primitive.bind` would run the equation in the current context.
    """
    read = [*dict.fromkeys(var for var in equation.invars if not isinstance(var, Literal))]
    made = [var for var in equation.outvars if not isinstance(var, DropVar)]
    single = _empty().replace(invars=read, outvars=made, eqns=[equation], effects=equation.effects)
    found = jaxpr_as_fun(closed(single))(*(env[var] for var in read))
    env.update(zip(made, found, strict=True))


@cache
def _empty() -> Jaxpr:
    return jax.make_jaxpr(lambda: ())().jaxpr


def value(env: Env, var: Var | Literal) -> jax.Array:
    """Return the value of a variable or of a literal."""
    return var.val if isinstance(var, Literal) else env[var]
