"""A traced function in two: some results at once, the others later from what is kept in between.

A backward pass gives the gradient of a chunk's input, which the stage before waits for, and those
of its parameters, for which nobody waits. Here its equations are dealt out to the two, each run
once: a loop over layers becomes two loops, of which the first keeps for every layer what the second
needs. Only what depends on arguments that are at hand both times is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal

from jaxdist.parallel.pipeline.split_backward.deal import Half, Loop, Step, deal, reads
from jaxdist.parallel.pipeline.split_backward.jaxprs import Env, bind, inlined, scan_counts, value


@dataclass(frozen=True)
class Halves:
    """Both parts of a function of (what is at hand both times, what is given the first time).

    Attributes:
      kept: shapes of what the first half hands to the second.
      first: (at hand, given) to (the results wanted first, kept).
      second: (at hand, kept) to the other results.
    """

    kept: tuple[jax.ShapeDtypeStruct, ...]
    first: Callable[[Any, Any], tuple[Any, list[jax.Array]]]
    second: Callable[[Any, Sequence[jax.Array]], Any]


def halve(function: Callable[[Any, Any], tuple[Any, Any]], at_hand: Any, given: Any) -> Halves:
    """`function` of (at_hand, given), which returns (wanted first, others), in two.

    Args:
      at_hand, given: arguments, or their shapes.
    """
    traced, (now, later) = jax.make_jaxpr(function, return_shape=True)(at_hand, given)
    closed = inlined(traced)
    count, early = len(jax.tree.leaves(at_hand)), len(jax.tree.leaves(now))
    invars, outvars = closed.jaxpr.invars, closed.jaxpr.outvars
    plan = deal(
        closed.jaxpr,
        at_hand=[i < count for i in range(len(invars))],
        outside=[False] * len(invars),
        first=[i < early for i in range(len(outvars))],
    )

    def start(leaves: Sequence[Any]) -> Env:
        return dict(
            zip((*closed.jaxpr.constvars, *invars), (*closed.consts, *leaves), strict=False)
        )

    def first(at_hand: Any, given: Any) -> tuple[Any, list[jax.Array]]:
        env = start(jax.tree.leaves((at_hand, given)))
        _run(plan.first, env, "first")
        found = [value(env, var) for var in outvars[:early]]
        return jax.tree.unflatten(jax.tree.structure(now), found), [env[k] for k in plan.kept]

    def second(at_hand: Any, kept: Sequence[jax.Array]) -> Any:
        env = {**start(jax.tree.leaves(at_hand)), **dict(zip(plan.kept, kept, strict=True))}
        _run(plan.second, env, "second")
        found = [value(env, var) for var in outvars[early:]]
        return jax.tree.unflatten(jax.tree.structure(later), found)

    shapes = jax.eval_shape(first, at_hand, given)[1]
    return Halves(tuple(shapes), first, second)


def _run(steps: Iterable[Step], env: Env, half: Half) -> None:
    for step in steps:
        if isinstance(step, Loop):
            (_run_first if half == "first" else _run_second)(step, env)
        else:
            bind(step, env)


def _run_first(loop: Loop, env: Env) -> None:
    found, kept = _scan(loop, env, "first", ())
    env.update(found)
    env.update(zip(loop.names, kept, strict=True))


def _run_second(loop: Loop, env: Env) -> None:
    found, _ = _scan(loop, env, "second", [env[name] for name in loop.names])
    env.update(found)


def _scan(
    loop: Loop, env: Env, half: Half, kept: Sequence[Any]
) -> tuple[dict[Any, Any], Sequence[Any]]:
    """Results of one of the two loops by variable, and what it keeps."""
    equation, inner = loop.equation, loop.body.jaxpr
    params = equation.params
    consts, carries = scan_counts(equation)
    own = [early == (half == "first") for early in loop.early]
    read = reads(loop, half)
    pairs = [*zip(inner.invars, equation.invars, strict=True)]
    usable = [(var, of) for var, of in pairs if isinstance(of, Literal) or of in read]
    carry = [
        pair for pair, mine in zip(pairs[consts : consts + carries], own, strict=False) if mine
    ]
    given = {id(var) for var, _ in pairs[consts + carries :]}
    slices = [pair for pair in usable if id(pair[0]) in given]
    fixed = dict(zip(inner.constvars, loop.body.consts, strict=True))
    fixed |= {var: value(env, of) for var, of in pairs[:consts] if (var, of) in usable}

    def body(state: Any, turn: Any) -> Any:
        values, more = turn
        env = {**fixed, **dict(zip((var for var, _ in carry), state, strict=True))}
        env |= dict(zip((var for var, _ in slices), values, strict=True))
        if half == "second":
            env |= dict(zip(loop.plan.kept, more, strict=True))
        _run(getattr(loop.plan, half), env, half)
        found = [value(env, var) for var, mine in zip(inner.outvars, own, strict=True) if mine]
        keeps = [env[key] for key in loop.plan.kept] if half == "first" else []
        return found[: len(carry)], (found[len(carry) :], keeps)

    last, (stacked, keeps) = lax.scan(
        body,
        [value(env, of) for _, of in carry],
        ([value(env, of) for _, of in slices], list(kept)),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    mine = [var for var, kept_here in zip(equation.outvars, own, strict=True) if kept_here]
    return dict(zip(mine, (*last, *stacked), strict=True)), keeps
