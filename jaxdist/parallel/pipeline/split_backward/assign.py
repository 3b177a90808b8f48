"""The assignment of a traced function's equations to its two halves, B and W.

The names are those of the halves of a backward pass in zero-bubble schedules (Qi et al. 2023, arXiv
2401.10241): B runs first and computes the gradient of the input; W computes the gradients of the
weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.extend.core import Literal as Constant

from jaxdist.parallel.pipeline.split_backward.jaxprs import closed, inlined, scan_counts

Half = Literal["b", "w"]


@dataclass(frozen=True)
class SplitScan:
    """A scan that becomes two scans, one in B and one in W.

    Attributes:
      body: the scan's body, with calls inlined.
      assignment: the assignment of the body's equations to the two scans.
      in_b: for each result of the scan (carries first), whether the scan in B computes it.
      names: keys of the arrays with the values that B keeps in all iterations, a key for each entry
        of `assignment.kept`.
    """

    equation: JaxprEqn
    body: ClosedJaxpr
    assignment: EquationAssignment
    in_b: tuple[bool, ...]
    names: tuple[Hashable, ...]


Step = JaxprEqn | SplitScan


@dataclass(frozen=True)
class EquationAssignment:
    """The equations of a jaxpr, assigned to B and W.

    Attributes:
      b, w: the steps of each half, in order.
      kept: variables, or names of a `SplitScan`, whose values B keeps for W.
      w_inputs: arguments that W receives itself, so that B need not keep them.
    """

    b: tuple[Step, ...]
    w: tuple[Step, ...]
    kept: tuple[Hashable, ...]
    w_inputs: frozenset[Var]


def assign(
    jaxpr: Jaxpr, *, at_hand: Sequence[bool], outside: Sequence[bool], in_b: Sequence[bool]
) -> EquationAssignment:
    """Assign the equations of `jaxpr` to the halves B and W.

    Args:
      at_hand: for each argument, whether both halves receive it anyway, at no cost in memory.
      outside: for each argument, whether the caller makes it available to both halves, as it does
        for arguments of a scan's body that come from outside of the scan.
      in_b: for each result, whether B computes it; W computes the others.
    """
    steps, needed = _steps_of_b(jaxpr, in_b), _made(jaxpr, [not early for early in in_b])
    fixed = {v for v, own in zip(jaxpr.invars, at_hand, strict=True) if own} | {*jaxpr.constvars}
    available = {v for v, own in zip(jaxpr.invars, outside, strict=True) if own} | fixed
    recomputable = fixed | _only_from(jaxpr, fixed)
    kept: dict[Hashable, None] = {}  # This dict serves as an ordered set.
    later: list[Step] = []
    for i, equation in reversed([*enumerate(jaxpr.eqns)]):
        mine = [var for var in equation.outvars if var in needed]
        step = steps.get(i, equation)
        if isinstance(step, SplitScan):
            made = {v for v, early in zip(equation.outvars, step.in_b, strict=True) if early}
            kept.update(dict.fromkeys(var for var in mine if var in made))
            mine = [var for var in mine if var not in made]
            if mine:
                kept.update(dict.fromkeys(step.names))
        elif i in steps and not all(var in recomputable for var in mine):
            # B runs the equation, and W needs its results, which are kept rather than computed
            # twice. But results that depend only on arguments of both halves (a cast of a weight)
            # are computed twice, since keeping them would cost memory for every microbatch.
            kept.update(dict.fromkeys(mine))
            mine = []
        if mine:
            later.append(step)
            needed.update(reads(step, "w"))
    kept.update(
        dict.fromkeys(var for var in jaxpr.invars if var in needed and var not in available)
    )
    now = tuple(steps[i] for i in sorted(steps))
    w_inputs = frozenset(var for var in jaxpr.invars if var in needed and var in available)
    return EquationAssignment(now, tuple(reversed(later)), tuple(kept), w_inputs)


def _steps_of_b(jaxpr: Jaxpr, in_b: Sequence[bool]) -> dict[int, Step]:
    """Return the steps that the results of half B need, by the position of each step's equation."""
    needed = _made(jaxpr, in_b)
    steps: dict[int, Step] = {}
    for i, equation in reversed([*enumerate(jaxpr.eqns)]):
        early = [var in needed for var in equation.outvars]
        if any(early):
            steps[i] = _split_scan(equation, early) or equation
            needed.update(reads(steps[i], "b"))
    return steps


def _made(jaxpr: Jaxpr, results: Sequence[bool]) -> set[Var]:
    """Return the variables among the chosen results, without those that are constants."""
    pairs = zip(jaxpr.outvars, results, strict=True)
    return {var for var, own in pairs if own and not isinstance(var, Constant)}


def _only_from(jaxpr: Jaxpr, fixed: set[Var]) -> set[Var]:
    """Return the variables of a jaxpr that depend only on the variables `fixed`."""
    found = set(fixed)
    for equation in jaxpr.eqns:
        if all(isinstance(var, Constant) or var in found for var in equation.invars):
            found.update(equation.outvars)
    return found


def reads(step: Step, half: Half) -> set[Var]:
    """Return the variables that a step reads in a half."""
    equation = step.equation if isinstance(step, SplitScan) else step
    read = equation.invars
    if isinstance(step, SplitScan):
        consts, carries = scan_counts(equation)
        inside = step.body.jaxpr.invars
        late = {i for i in range(carries) if not step.in_b[i]}
        if half == "b":
            skipped = {consts + i for i in late}
        else:
            # W reads its own initial carries, and those constants and slices that the body reads
            # in W.
            used = {i for i, var in enumerate(inside) if var in step.assignment.w_inputs}
            skipped = {*range(len(inside))} - used - {consts + i for i in late}
        read = [var for i, var in enumerate(equation.invars) if i not in skipped]
    return {var for var in read if not isinstance(var, Constant)}


def _split_scan(equation: JaxprEqn, early: Sequence[bool]) -> SplitScan | None:
    """Split a scan, where `early` marks the results that B needs.

    The result is None if the equation is not a scan, if B needs everything, or if nothing would
    remain for W.
    """
    if equation.primitive.name != "scan" or all(early):
        return None
    consts, carries = scan_counts(equation)
    body = inlined(closed(equation.params["jaxpr"]))
    early = [*early]
    # A carry that a result of B depends on belongs to B as well, and so do the carries on which
    # this carry depends. The loop ends when no carry is added, since each carry feeds the next
    # iteration of the scan.
    while True:
        reached = _reached(body.jaxpr, early)
        more = [
            own or (i < carries and body.jaxpr.invars[consts + i] in reached)
            for i, own in enumerate(early)
        ]
        if more == early:
            break
        early = more
    total = len(body.jaxpr.invars)
    carried = [consts <= i < consts + carries for i in range(total)]
    made_in_b = [own and early[i - consts] for i, own in enumerate(carried)]
    assignment = assign(
        body.jaxpr,
        # W's scan carries sums that B's scan does not (gradients of weights that layers share), so
        # these carries are at hand in W. A carry of B's scan is neither at hand nor outside: W's
        # scan does not have it, and B's scan keeps it for each iteration if W needs it.
        at_hand=[own and not made for own, made in zip(carried, made_in_b, strict=True)],
        outside=[not own for own in carried],
        in_b=early,
    )
    if all(early) or not assignment.w:
        return None
    names = tuple(object() for _ in assignment.kept)
    return SplitScan(equation, body, assignment, tuple(early), names)


def _reached(jaxpr: Jaxpr, outputs: Sequence[bool]) -> set[Var]:
    """Return the variables of a jaxpr on which the results marked in `outputs` depend."""
    found = _made(jaxpr, outputs)
    for equation in reversed(jaxpr.eqns):
        if any(var in found for var in equation.outvars):
            found.update(var for var in equation.invars if not isinstance(var, Constant))
    return found
