"""A pipeline's loop over ticks, in which groups of devices take branches that are known in advance.

All devices run the same program, and a transfer in each tick synchronizes the devices. The program
contains a table of the branches that each group takes in each tick. `ConditionalDecision` contains
the same table, so that a simulation takes the same branches. A conditional that depends on the tick
is in a named scope that begins with `SCOPE`. The name of the conditional, such as "backward/last",
consists of the names of all such scopes around the conditional, without `SCOPE`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jaxdist.hlo.loops import Frame
from jaxdist.hlo.parse import Computation, Instruction, Module

SCOPE = "tick."
_SCOPES = re.compile(rf"(?:^|[/(]){re.escape(SCOPE)}([\w\-]+)")
_DECIDED = re.compile(rf"(?:^|[/(]){re.escape(SCOPE)}[\w\-]+\)*/cond$")

Choices = tuple[tuple[str, float], ...]
"""Pairs of a conditional's name and the number of the branch that is taken, sorted by name."""


@dataclass(frozen=True)
class ConditionalDecision:
    """The branches that a conditional takes in each tick.

    Attributes:
      branches: the conditional's number of branches.
      taken: the number of the branch that a group takes in a tick, as an array `[ticks, groups]` of
        any numeric dtype. The number is arbitrary if the group does not take the enclosing branch.
        For a conditional in a loop within the tick, the number is the mean over the iterations of
        that loop: 0.75 means branch 1 in three of four iterations, and branch 0 in the fourth
        iteration.
    """

    branches: int
    taken: np.ndarray


@dataclass(frozen=True)
class Lockstep:
    """The branches of all conditionals in a loop over ticks.

    Attributes:
      name: the pipeline schedule's name.
      decisions: the branches of each conditional, by the conditional's name. The compiled program
        may lack some of the conditionals.
    """

    name: str
    decisions: Mapping[str, ConditionalDecision]

    @property
    def ticks(self) -> int:
        """The number of iterations of the pipeline's loop, one for each tick."""
        return len(next(iter(self.decisions.values())).taken)

    @property
    def groups(self) -> int:
        """The number of groups of devices; the devices of a group take the same branches."""
        return next(iter(self.decisions.values())).taken.shape[1]

    def turns(self, module: Module) -> Iterator[Counter[Choices]]:
        """Yield, for each tick, the number of groups that take each combination of branches.

        A combination has a branch for each of the conditionals that the given program has.
        """
        there = {conditional_name(one) for one in _decided(module.computations.values())}
        names = [name for name in sorted(self.decisions) if name in there]
        taken = np.stack([self.decisions[name].taken.astype(float) for name in names], axis=-1)
        for tick in taken.tolist():
            yield Counter(tuple(zip(names, row, strict=True)) for row in tick)


def conditional_name(conditional: Instruction) -> str | None:
    """Return the name of a conditional that depends on the tick, or None for other instructions.

    >>> from jaxdist.hlo.parse import parse_instruction
    >>> line = (
    ...     '  %c = () conditional(%i, %a, %b), branch_computations={%x, %y}, '
    ...     'metadata={op_name="jit(f)/while/body/tick.backward/cond/branch_1_fun/tick.last/cond"}'
    ... )
    >>> conditional_name(parse_instruction(line))
    'backward/last'
    """
    if conditional.opcode != "conditional" or not _DECIDED.search(conditional.source):
        return None
    return "/".join(_SCOPES.findall(conditional.source))


def place_of(conditional: Instruction, number: int) -> int:
    """Return the index in `conditional.branches` of the branch with the given number.

    If the conditional's predicate is a bool, HLO writes the branch for true (number 1) before the
    branch for false (number 0).
    """
    return 1 - number if conditional.called("true_computation") else number


def tick_loops(module: Module) -> list[Instruction]:
    """Return the program's outermost loops that contain a conditional which depends on the tick."""
    return [
        loop
        for loop in module.entry.instructions
        if loop.opcode == "while" and _decided(_reached(module, loop.called("body")))
    ]


def mismatch(module: Module, lockstep: Lockstep) -> str | None:
    """Return why a program does not match a schedule's ticks, or None if the program matches.

    A program matches if exactly one loop contains all conditionals that depend on the tick, if the
    loop has an iteration for each tick, and if each conditional has the given branches in order.
    The order is known from the number of a branch, which jax writes into the `op_name` of the
    instructions in the branch.
    """
    loops = tick_loops(module)
    if len(loops) != 1:
        return (
            f"{len(loops)} loops of the program, instead of a single loop, have branches that "
            "depend on the tick"
        )
    (loop,) = loops
    trips = Frame(module, module.entry).trips(loop)
    if trips != lockstep.ticks:
        return (
            f"the program's loop has {trips or 'an unknown number of'} iterations instead of "
            f"{lockstep.ticks}"
        )
    inside = _decided(_reached(module, loop.called("body")))
    if len(inside) != len(_decided(module.computations.values())):
        return "branches that depend on the tick are outside of the program's loop"
    return next(filter(None, (_differs(module, one, lockstep) for one in inside)), None)


def _differs(module: Module, conditional: Instruction, lockstep: Lockstep) -> str | None:
    """Return the reason why a conditional does not match the decision with the conditional's name.

    The result is None if the conditional matches.
    """
    name = conditional_name(conditional) or ""
    decision, count = lockstep.decisions.get(name), len(conditional.branches)
    if decision is None:
        return f"{name} does not depend on the tick"
    if count != decision.branches:
        return f"{name} has {count} branches in the program instead of {decision.branches}"
    scope = re.escape(SCOPE + name.split("/")[-1])
    written = re.compile(rf"(?:^|[/(]){scope}\)*/cond/branch_(\d+)_fun(?:/|$)")
    for number in range(count):
        branch, _ = conditional.branches[place_of(conditional, number)]
        sources = [i.source for i in module.computations[branch].instructions]
        found = {int(n) for source in sources for n in written.findall(source)}
        # If the source names of a branch contain no branch number, they cannot contradict `number`.
        if found and number not in found:
            return (
                f"branch {number} of {name} contains instructions of the branches {sorted(found)} "
                "of the source"
            )
    return None


def _decided(computations: Iterable[Computation]) -> list[Instruction]:
    return [i for c in computations for i in c.instructions if conditional_name(i) is not None]


def _reached(module: Module, names: Iterable[str]) -> list[Computation]:
    """Return the computations with the given names, and all computations that they reach.

    A computation reaches what it calls, the bodies of its loops, and the branches of its
    conditionals.
    """
    found: dict[str, Computation] = {}
    pending = [*names]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found[name] = module.computations[name]
        for instruction in found[name].instructions:
            if instruction.opcode in ("call", "while"):
                pending += [*instruction.called("to_apply"), *instruction.called("body")]
            elif instruction.opcode == "conditional":
                pending += [branch for branch, _ in instruction.branches]
    return [*found.values()]
