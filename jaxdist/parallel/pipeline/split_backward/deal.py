"""Which equations of a traced function make which of its results: a deal between two halves."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import Literal as Constant

from jaxdist.parallel.pipeline.split_backward.jaxprs import closed, inlined, scan_counts

Half = Literal["first", "second"]


@dataclass(frozen=True)
class Loop:
    """A scan in two.

    Attributes:
      early: of its results, carries first, which the first loop makes.
      names: of what the first keeps for each turn.
    """

    equation: JaxprEqn
    body: ClosedJaxpr
    plan: Plan
    early: tuple[bool, ...]
    names: tuple[Hashable, ...]


Step = JaxprEqn | Loop


@dataclass(frozen=True)
class Plan:
    """Steps of both halves in order; `inputs` are the arguments that the second reads again."""

    first: tuple[Step, ...]
    second: tuple[Step, ...]
    kept: tuple[Hashable, ...]
    inputs: frozenset[Hashable]


def deal(
    jaxpr: Jaxpr, *, at_hand: Sequence[bool], outside: Sequence[bool], first: Sequence[bool]
) -> Plan:
    """Deals out the equations.

    Args:
      at_hand: of the arguments, which both halves have, without their being kept.
      outside: those that both have because whoever calls keeps them.
      first: of the results, those of the first half.
    """
    wanted = _made(jaxpr, first)
    steps: dict[int, Step] = {}
    for i, equation in reversed([*enumerate(jaxpr.eqns)]):
        early = [var in wanted for var in equation.outvars]
        if any(early):
            steps[i] = _loop(equation, early) or equation
            wanted.update(reads(steps[i], "first"))
    fixed = {v for v, own in zip(jaxpr.invars, at_hand, strict=True) if own} | {*jaxpr.constvars}
    held = {v for v, own in zip(jaxpr.invars, outside, strict=True) if own} | fixed
    dry = fixed | _only_from(jaxpr, fixed)
    kept: dict[Hashable, None] = {}
    later: list[Step] = []
    wanted = _made(jaxpr, [not early for early in first])
    for i, equation in reversed([*enumerate(jaxpr.eqns)]):
        mine = [var for var in equation.outvars if var in wanted]
        step = steps.get(i, equation)
        if isinstance(step, Loop):
            made = {v for v, early in zip(equation.outvars, step.early, strict=True) if early}
            kept.update(dict.fromkeys(var for var in mine if var in made))
            mine = [var for var in mine if var not in made]
            if mine:
                kept.update(dict.fromkeys(step.names))
        elif i in steps and not all(var in dry for var in mine):
            kept.update(dict.fromkeys(mine))
            mine = []
        if mine:
            later.append(step)
            wanted.update(reads(step, "second"))
    kept.update(dict.fromkeys(var for var in jaxpr.invars if var in wanted and var not in held))
    now = tuple(steps[i] for i in sorted(steps))
    inputs = frozenset(var for var in jaxpr.invars if var in wanted and var in held)
    return Plan(now, tuple(reversed(later)), tuple(kept), inputs)


def _made(jaxpr: Jaxpr, results: Sequence[bool]) -> set[Any]:
    """The variables among these results; a result may also be a constant."""
    pairs = zip(jaxpr.outvars, results, strict=True)
    return {var for var, own in pairs if own and not isinstance(var, Constant)}


def _only_from(jaxpr: Jaxpr, fixed: set[Any]) -> set[Any]:
    """The variables that depend on these alone."""
    found = set(fixed)
    for equation in jaxpr.eqns:
        if all(isinstance(var, Constant) or var in found for var in equation.invars):
            found.update(equation.outvars)
    return found


def reads(step: Step, half: Half) -> set[Any]:
    equation = step.equation if isinstance(step, Loop) else step
    read = equation.invars
    if isinstance(step, Loop):
        consts, carries = scan_counts(equation)
        inside = step.body.jaxpr.invars
        late = {i for i in range(carries) if not step.early[i]}
        if half == "first":
            skipped = {consts + i for i in late}
        else:
            used = {i for i, var in enumerate(inside) if var in step.plan.inputs}
            skipped = {*range(len(inside))} - used - {consts + i for i in late}
        read = [var for i, var in enumerate(equation.invars) if i not in skipped]
    return {var for var in read if not isinstance(var, Constant)}


def _loop(equation: JaxprEqn, early: Sequence[bool]) -> Loop | None:
    """A scan whose results are not all wanted first, in two; None where that leaves one empty."""
    if equation.primitive.name != "scan" or all(early):
        return None
    consts, carries = scan_counts(equation)
    body = inlined(closed(equation.params["jaxpr"]))
    early = [*early]
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
    made_first = [own and early[i - consts] for i, own in enumerate(carried)]
    plan = deal(
        body.jaxpr,
        # Carries of the second loop are its own.
        at_hand=[own and not made for own, made in zip(carried, made_first, strict=True)],
        outside=[not own for own in carried],
        first=early,
    )
    if all(early) or not plan.second:
        return None
    return Loop(equation, body, plan, tuple(early), tuple(object() for _ in plan.kept))


def _reached(jaxpr: Jaxpr, outputs: Sequence[bool]) -> set[Any]:
    """The variables that these results need."""
    found = _made(jaxpr, outputs)
    for equation in reversed(jaxpr.eqns):
        if any(var in found for var in equation.outvars):
            found.update(var for var in equation.invars if not isinstance(var, Constant))
    return found
