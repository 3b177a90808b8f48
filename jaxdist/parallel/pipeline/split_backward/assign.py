"""The assignment of the equations of a traced backward pass to its two halves, B and W.

The names are from zero-bubble schedules (Qi et al. 2023, arXiv 2401.10241). B runs first and
computes the gradient of the input, and W computes the gradients of the weights. Schedules call
the first half I, because B is the undivided backward pass there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.extend.core import Literal as Constant

from jaxdist.jaxprs import closed, inlined, scan_counts

Half = Literal["b", "w"]


@dataclass(frozen=True)
class SplitScan:
    """A scan that is divided into two scans, one in each half (B and W) of a backward pass.

    Attributes:
      equation: the equation of the scan.
      body: the scan's body, with calls inlined.
      assignment: the assignment of the body's equations to the two scans.
      in_b: for each result of the scan (carries first), whether the scan in B computes it.
      names: a key for each entry of `assignment.kept`. B keeps an array with this key for W: the
        values of the entry in all iterations.
    """

    equation: JaxprEqn
    body: ClosedJaxpr
    assignment: EquationAssignment
    in_b: tuple[bool, ...]
    names: tuple[Hashable, ...]


Step = JaxprEqn | SplitScan


@dataclass(frozen=True)
class EquationAssignment:
    """The assignment of the equations of a jaxpr to B and W, the halves of a backward pass.

    Attributes:
      b, w: the equations and divided scans that each half runs, in order.
      kept: the keys of the values that B keeps for W: variables, and `SplitScan.names`.
      w_inputs: the arguments of the jaxpr that W reads and receives from the caller, so that B need
        not keep them.
    """

    b: tuple[Step, ...]
    w: tuple[Step, ...]
    kept: tuple[Hashable, ...]
    w_inputs: frozenset[Var]


def assign(
    jaxpr: Jaxpr, *, at_hand: Sequence[bool], outside: Sequence[bool], in_b: Sequence[bool]
) -> EquationAssignment:
    """Assign the equations of `jaxpr` to B (gradient of the input) and W (of the weights).

    Args:
      jaxpr: the traced function, with calls inlined.
      at_hand: for each argument, whether both halves receive it at no cost in memory. Equations
        that depend only on these arguments may run in both halves.
      outside: for each argument that is not at hand, whether W can read the argument without
        the help of B. W can read the arguments of a scan's body that are not carries.
      in_b: for each result, whether B computes it. W computes the other results.
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
            # B runs the equation and W needs its results, so B keeps them. Results that depend
            # only on arguments of both halves (a cast of a weight) are an exception: both halves
            # compute them, since keeping them would cost memory for every microbatch.
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
    """Return the equations or divided scans that the results of half B need.

    The keys are the indices of the equations in `jaxpr`.
    """
    needed = _made(jaxpr, in_b)
    steps: dict[int, Step] = {}
    for i, equation in reversed([*enumerate(jaxpr.eqns)]):
        early = [var in needed for var in equation.outvars]
        if any(early):
            steps[i] = _split_scan(equation, early) or equation
            needed.update(reads(steps[i], "b"))
    return steps


def _made(jaxpr: Jaxpr, results: Sequence[bool]) -> set[Var]:
    """Return the variables among the results of a jaxpr that are marked in `results`.

    A result that is a constant has no variable.
    """
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
    """Return the variables that an equation or a divided scan reads when a half runs it.

    The two scans of a `SplitScan` read different variables.
    """
    equation = step.equation if isinstance(step, SplitScan) else step
    read = equation.invars
    if isinstance(step, SplitScan):
        consts, carries = scan_counts(equation)
        inside = step.body.jaxpr.invars
        late = {i for i in range(carries) if not step.in_b[i]}
        if half == "b":
            skipped = {consts + i for i in late}
        else:
            # The scan in W reads the initial values of its carries. The scan in W also reads the
            # constants and slices that its body reads.
            used = {i for i, var in enumerate(inside) if var in step.assignment.w_inputs}
            skipped = {*range(len(inside))} - used - {consts + i for i in late}
        read = [var for i, var in enumerate(equation.invars) if i not in skipped]
    return {var for var in read if not isinstance(var, Constant)}


def _split_scan(equation: JaxprEqn, early: Sequence[bool]) -> SplitScan | None:
    """Divide a scan into a scan in half B and a scan in half W.

    Args:
      equation: the equation of the scan.
      early: for each result, whether B needs it.

    Returns:
      The divided scan, or None if the equation is not a scan, if B needs all of its results, or if
      W would have nothing to compute.
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
        # Some sums (gradients of weights that layers share) are carries of W's scan only, so W can
        # read them (`at_hand`). A carry of B's scan is neither `at_hand` nor `outside`: W's scan
        # does not have it, so B's scan keeps it for each iteration if W needs it.
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
