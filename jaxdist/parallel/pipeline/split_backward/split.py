"""The division of a backward pass into two functions, B and W.

B computes the gradient of a chunk's input, for which the previous stage waits. W computes the
gradients of the chunk's weights, for which no stage waits. In schedules, the half B is the task I
(see `assign`). The equations of the traced backward pass are divided between B and W, and each
equation runs once. A loop over layers becomes two loops, and the loop in B keeps the values of each
layer that the loop in W needs. Only equations that depend on nothing except arguments of both
halves may run twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
from jax import lax
from jax.extend.core import Literal

from jaxdist.jaxprs import Env, bind, inlined, scan_counts, value
from jaxdist.parallel.pipeline.split_backward.assign import Half, SplitScan, Step, assign, reads
from jaxdist.types import PyTree


@dataclass(frozen=True)
class SplitFunction:
    """The two halves of a function of (arguments of both halves, arguments of B only).

    Attributes:
      kept: the shapes of the values that B keeps for W.
      b: the function from the arguments of the divided function to its first result and the kept
        values.
      w: the function from (arguments of both halves, kept values) to the second result of the
        divided function.
    """

    kept: tuple[jax.ShapeDtypeStruct, ...]
    b: Callable[[PyTree, PyTree], tuple[PyTree, list[jax.Array]]]
    w: Callable[[PyTree, Sequence[jax.Array]], PyTree]


def split_function(
    function: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], at_hand: PyTree, given: PyTree
) -> SplitFunction:
    """Divide a function into two halves: B computes its first result, and W its second result.

    Args:
      function: the function from (at_hand, given) to two results.
      at_hand: the arguments that both halves receive, or their shapes.
      given: the arguments that only B receives, or their shapes.
    """
    traced, (now, later) = jax.make_jaxpr(function, return_shape=True)(at_hand, given)
    closed = inlined(traced)
    count, early = len(jax.tree.leaves(at_hand)), len(jax.tree.leaves(now))
    invars, outvars = closed.jaxpr.invars, closed.jaxpr.outvars
    assignment = assign(
        closed.jaxpr,
        at_hand=[i < count for i in range(len(invars))],
        outside=[False] * len(invars),
        in_b=[i < early for i in range(len(outvars))],
    )

    def start(leaves: Sequence[jax.Array]) -> Env:
        # For W, `zip` stops at the arguments of both halves, which are all that W receives. If W
        # needs another argument, B keeps it for W.
        return dict(
            zip((*closed.jaxpr.constvars, *invars), (*closed.consts, *leaves), strict=False)
        )

    def b(at_hand: PyTree, given: PyTree) -> tuple[PyTree, list[jax.Array]]:
        env = start(jax.tree.leaves((at_hand, given)))
        _run(assignment.b, env, "b")
        found = [value(env, var) for var in outvars[:early]]
        return jax.tree.unflatten(jax.tree.structure(now), found), [env[k] for k in assignment.kept]

    def w(at_hand: PyTree, kept: Sequence[jax.Array]) -> PyTree:
        env = {**start(jax.tree.leaves(at_hand)), **dict(zip(assignment.kept, kept, strict=True))}
        _run(assignment.w, env, "w")
        found = [value(env, var) for var in outvars[early:]]
        return jax.tree.unflatten(jax.tree.structure(later), found)

    shapes = jax.eval_shape(b, at_hand, given)[1]
    return SplitFunction(tuple(shapes), b, w)


def _run(steps: Iterable[Step], env: Env, half: Half) -> None:
    for step in steps:
        if not isinstance(step, SplitScan):
            bind(step, env)
        elif half == "b":
            found, kept = _scan(step, env, "b", ())
            env.update({**found, **dict(zip(step.names, kept, strict=True))})
        else:
            env.update(_scan(step, env, "w", [env[name] for name in step.names])[0])


def _scan(
    loop: SplitScan, env: Env, half: Half, kept: Sequence[jax.Array]
) -> tuple[Env, Sequence[jax.Array]]:
    """Run the scan of a half, and return its results and the values that it keeps.

    Args:
      loop: the divided scan.
      env: the values that the scan reads.
      half: "b" or "w".
      kept: the values that the scan in B kept, stacked over iterations, or () for the scan in B
        itself.

    Returns:
      The results of the scan by variable, and the kept values, stacked over iterations. The scan in
      W keeps nothing.
    """
    equation, inner = loop.equation, loop.body.jaxpr
    params = equation.params
    consts, carries = scan_counts(equation)
    own = [early == (half == "b") for early in loop.in_b]
    read = reads(loop, half)
    pairs = [*zip(inner.invars, equation.invars, strict=True)]
    # Arguments of the scan that only B reads may be missing in the environment of W.
    usable = [(var, of) for var, of in pairs if isinstance(of, Literal) or of in read]
    # `zip` stops at the end of the carries. The rest of `own` is for the stacked results.
    carry = [
        pair for pair, mine in zip(pairs[consts : consts + carries], own, strict=False) if mine
    ]
    # Slices are found by the identity of the inner variable, because an inner variable occurs once
    # in the pairs, but the same argument may occur several times.
    given = {id(var) for var, _ in pairs[consts + carries :]}
    slices = [pair for pair in usable if id(pair[0]) in given]
    fixed = dict(zip(inner.constvars, loop.body.consts, strict=True))
    fixed |= {var: value(env, of) for var, of in pairs[:consts] if (var, of) in usable}

    def body(state: PyTree, now: PyTree) -> tuple[PyTree, PyTree]:
        values, more = now
        env = {**fixed, **dict(zip((var for var, _ in carry), state, strict=True))}
        env |= dict(zip((var for var, _ in slices), values, strict=True))
        if half == "w":
            env |= dict(zip(loop.assignment.kept, more, strict=True))
        _run(getattr(loop.assignment, half), env, half)
        found = [value(env, var) for var, mine in zip(inner.outvars, own, strict=True) if mine]
        keeps = [env[key] for key in loop.assignment.kept] if half == "b" else []
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
