"""The FLOPs and collectives of a program, summed over every loop, branch and called computation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxdist.hlo.collective import Collectives
from jaxdist.hlo.flops import instruction_flops
from jaxdist.hlo.groups import MeshLayout
from jaxdist.hlo.loops import Frame
from jaxdist.hlo.parse import Instruction, Module
from jaxdist.hlo.records import Collective

MOST_TURNS = 256
"""The largest number of iterations that are counted one by one, for a loop with inner loops."""


@dataclasses.dataclass(frozen=True)
class Totals:
    """The work of a part of the program on each device.

    Attributes:
      flops: the least and the largest number of FLOPs.
      collectives: the records of the executed collectives.
      unknown_loops: the names of loops whose length is unknown.
    """

    flops: tuple[float, float] = (0.0, 0.0)
    collectives: tuple[Collective, ...] = ()
    unknown_loops: tuple[str, ...] = ()

    def times(self, low: int, high: int) -> Totals:
        """Return the totals of a part of a program that runs from `low` to `high` times."""
        scaled = (
            dataclasses.replace(c, times_low=c.times_low * low, times_high=c.times_high * high)
            for c in self.collectives
        )
        flops = (self.flops[0] * low, self.flops[1] * high)
        return Totals(flops, tuple(scaled), self.unknown_loops)


def in_sequence(parts: list[Totals]) -> Totals:
    """Return the totals of several parts of a program that run one after another."""
    return Totals(
        (sum(part.flops[0] for part in parts), sum(part.flops[1] for part in parts)),
        tuple(c for part in parts for c in part.collectives),
        tuple(dict.fromkeys(name for part in parts for name in part.unknown_loops)),
    )


def one_of(branches: list[Totals]) -> Totals:
    """Return the totals of a conditional, which runs a single branch.

    The least number of executions of each collective is 0. FLOPs range from the FLOPs of the
    cheapest branch to the FLOPs of the most expensive branch.
    """
    all_maybe = in_sequence([branch.times(0, 1) for branch in branches])
    flops = [branch.flops for branch in branches]
    bounds = (min(low for low, _ in flops), max(high for _, high in flops))
    return dataclasses.replace(all_maybe, flops=bounds)


def account(module: Module, layout: MeshLayout) -> Totals:
    """Return a device's totals for the complete program.

    The totals have a single record for each collective instruction.
    """
    found = _Walk(module, layout).computation(Frame(module, module.entry))
    merged: dict[str, Collective] = {}
    # Several callers may share a computation, whose collectives are then found several times.
    for one in found.collectives:
        seen = merged.get(one.name)
        merged[one.name] = one if seen is None else _both(seen, one)
    return dataclasses.replace(found, collectives=tuple(merged.values()))


def _both(first: Collective, second: Collective) -> Collective:
    """Return the sum of two records of the same instruction, which two callers execute."""
    return dataclasses.replace(
        first,
        times_low=first.times_low + second.times_low,
        times_high=first.times_high + second.times_high,
        bounded=first.bounded and second.bounded,
    )


class _Walk:
    """The recursion over computations, which adds up the work of each computation."""

    def __init__(self, module: Module, layout: MeshLayout) -> None:
        self.module = module
        self.collectives = Collectives(module, layout)

    def computation(self, frame: Frame) -> Totals:
        return in_sequence([part for part in self._parts(frame) if part != Totals()])

    def _parts(self, frame: Frame) -> Iterator[Totals]:
        computation = frame.computation
        for instruction in computation.instructions:
            parts = self.module.parts(instruction, computation)
            flops = sum(instruction_flops(one, inside) for one, inside in parts)
            yield Totals((flops, flops), self.collectives.begun(instruction, computation))
            match instruction.opcode:
                case "call":
                    yield self.computation(frame.enter(instruction))
                case "while":
                    yield self._loop(frame, instruction)
                case "conditional":
                    branches = (frame.enter_branch(*branch) for branch in instruction.branches)
                    yield one_of([self.computation(branch) for branch in branches])

    def _loop(self, frame: Frame, loop: Instruction) -> Totals:
        body = self.computation(frame.enter_loop(loop, "body"))
        condition = self.computation(frame.enter_loop(loop, "condition"))
        trips = frame.trips(loop)
        if trips is not None:
            each = self._each_turn(frame, loop, trips) if body.unknown_loops else None
            turns = body.times(trips, trips) if each is None else each
            # A loop evaluates its condition once more than its body, since the last test fails.
            return in_sequence([turns, condition.times(trips + 1, trips + 1)])
        # The number of iterations is unknown: the body counts as 0 to 1 iterations, and is marked
        # as unbounded.
        once = in_sequence([body.times(0, 1), condition])
        name = loop.source or loop.name
        return Totals(
            once.flops,
            tuple(dataclasses.replace(c, bounded=False) for c in once.collectives),
            (name, *once.unknown_loops),
        )

    def _each_turn(self, frame: Frame, loop: Instruction, trips: int) -> Totals | None:
        """Return the totals of all iterations of a loop, each of which is counted separately.

        The length of inner loops may differ between iterations. The result is None if there are
        more than `MOST_TURNS` iterations, or if the length of an inner loop remains unknown.
        """
        if trips > MOST_TURNS:
            return None
        parts = []
        for turn in frame.turns(loop, trips):
            part = self.computation(turn)
            if part.unknown_loops:
                return None
            parts.append(part)
        return in_sequence(parts)
