"""How often a loop runs: XLA's `known_trip_count`, else read from the loop itself.

XLA:TPU drops the count from the compiled program, so the counter is followed: the scalars that the
condition reads are evaluated at the start and after one and two turns of the body. Where they
move by equal steps, the first turn on which the condition fails is found by bisection.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from jaxdist.hlo.parse import Computation, Instruction, Module

Path = tuple[int, ...]
"""Indices into nested tuples; empty for a value that is no tuple."""
Arguments = Callable[[int, Path], int | None]
"""Parameter number and path to its value; None where it is not known."""

LONGEST = 2**40
"""Loops that do not end by then count as unknown."""

_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_INTEGER = re.compile(r"[su]\d+\[\]|pred\[\]")
_SAME = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "opt-barrier")
_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
    "and": operator.and_,
    "or": operator.or_,
}
_COMPARE: Mapping[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
}
_CONSTANTS = {"true": 1, "false": 0}


def _unknown(number: int, path: Path) -> int | None:
    return None


class Frame:
    """A computation with what is known of its arguments: evaluates integer scalars."""

    def __init__(
        self, module: Module, computation: Computation, arguments: Arguments = _unknown
    ) -> None:
        self.module = module
        self.computation = computation
        self._arguments = arguments

    def value(self, name: str, path: Path = ()) -> int | None:
        """The integer at `path` of what `name` computes; None where it is not known."""
        instruction = self.computation.by_name[name]
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "parameter":
            return self._arguments(int(instruction.arguments), path)
        if opcode == "get-tuple-element":
            index = instruction.number("index")
            assert index is not None
            return self.value(operands[0], (index, *path))
        if opcode == "tuple" and path:
            return self.value(operands[path[0]], path[1:])
        if opcode == "while":
            kept = path and path[0] in invariants(self.called(instruction, "body"))
            return self.value(operands[0], path) if kept else None
        if opcode in _SAME:
            return self.value(operands[0], path)
        if opcode in ("fusion", "call"):
            callee = self.enter(instruction)
            return callee.value(callee.computation.root.name, path)
        return self._scalar(instruction)

    def _scalar(self, instruction: Instruction) -> int | None:
        # Only scalars are followed: arrays would lead through the whole program.
        if not _INTEGER.match(instruction.type_text):
            return None
        if instruction.opcode == "constant":
            word = _CONSTANTS.get(instruction.arguments, instruction.arguments)
            return int(word)
        if instruction.opcode == "compare":
            found = re.search(r"\bdirection=(\w+)", instruction.attributes)
            apply = _COMPARE.get(found[1]) if found else None
        else:
            apply = _ARITHMETIC.get(instruction.opcode)
        if apply is None:
            return None
        left, right = (self.value(name) for name in instruction.operands)
        return None if left is None or right is None else int(apply(left, right))

    def called(self, instruction: Instruction, attribute: str) -> Computation:
        """The computation that an attribute of the instruction names."""
        return self.module.computations[instruction.called(attribute)[0]]

    def enter(self, caller: Instruction) -> Frame:
        """The frame of the computation that a fusion, call or async-start runs."""
        operands = caller.operands
        attribute = "calls" if caller.called("calls") else "to_apply"
        return Frame(
            self.module,
            self.called(caller, attribute),
            lambda number, path: self.value(operands[number], path),
        )

    def enter_branch(self, name: str, operand: str) -> Frame:
        """The frame of one branch of a conditional."""
        return Frame(
            self.module, self.module.computations[name], lambda _, path: self.value(operand, path)
        )

    def enter_loop(
        self, loop: Instruction, attribute: str, counters: Mapping[Path, int] | None = None
    ) -> Frame:
        """The frame of a loop's body or condition: invariants are known, and the given counters."""
        kept = invariants(self.called(loop, "body"))

        def arguments(number: int, path: Path) -> int | None:
            if counters is not None and path in counters:
                return counters[path]
            return self.value(loop.operands[0], path) if path and path[0] in kept else None

        return Frame(self.module, self.called(loop, attribute), arguments)

    def trips(self, loop: Instruction) -> int | None:
        """How often the body of a while runs; None where that is not to be seen."""
        if found := _TRIP_COUNT.search(loop.attributes):
            return int(found[1])
        counters = self._counters(loop)
        if counters is None:
            return None

        def goes_on(turn: int) -> int | None:
            now = {path: start + step * turn for path, (start, step) in counters.items()}
            condition = self.enter_loop(loop, "condition", now)
            return condition.value(condition.computation.root.name)

        return _first_failure(goes_on)

    def _counters(self, loop: Instruction) -> dict[Path, tuple[int, int]] | None:
        """Start and step of each scalar that the condition reads; None if one is not affine."""
        reads = _scalars_read(self.called(loop, "condition"))
        source, frame = loop.operands[0], self
        turns: list[dict[Path, int]] = []
        for _ in range(3):
            values = {path: frame.value(source, path) for path in reads}
            known = {path: value for path, value in values.items() if value is not None}
            if len(known) < len(reads):
                return None
            turns.append(known)
            frame = self.enter_loop(loop, "body", known)
            source = frame.computation.root.name
        first, second, third = turns
        if any(third[path] - second[path] != second[path] - first[path] for path in reads):
            return None
        return {path: (first[path], second[path] - first[path]) for path in reads}


def _first_failure(goes_on: Callable[[int], int | None]) -> int | None:
    """The first turn on which a condition fails that stays failed from there on.

    >>> _first_failure(lambda turn: 3 * turn < 100)
    34
    """
    high = 1
    if not (start := goes_on(0)):
        return 0 if start == 0 else None
    while goes_on(high):
        high *= 2
        if high > LONGEST:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if goes_on(middle) else (low, middle)
    return high


@lru_cache(maxsize=4096)
def _scalars_read(condition: Computation) -> tuple[Path, ...]:
    """Paths of the integer scalars of the loop's state that its condition takes out."""
    return tuple(
        () if instruction.opcode == "parameter" else (instruction.number("index") or 0,)
        for instruction in condition.instructions
        if instruction.opcode in ("get-tuple-element", "parameter")
        and _INTEGER.match(instruction.type_text)
    )


@lru_cache(maxsize=4096)
def invariants(body: Computation) -> frozenset[int]:
    """Indices of the loop's state that the body hands on as they came."""
    root = body.root
    if root.opcode != "tuple":
        return frozenset()

    def origin(name: str) -> int | None:
        instruction = body.by_name[name]
        while instruction.opcode in ("copy", "bitcast"):
            instruction = body.by_name[instruction.operands[0]]
        if instruction.opcode != "get-tuple-element":
            return None
        owner = body.by_name[instruction.operands[0]]
        return instruction.number("index") if owner.opcode == "parameter" else None

    return frozenset(
        index for index, operand in enumerate(root.operands) if origin(operand) == index
    )
