"""How often a loop runs: XLA's `known_trip_count`, else read from the loop itself.

XLA:TPU drops the count from the compiled program, so the counter is read: the scalars that the
condition depends on are evaluated as the loop begins. Where the body is seen to move each by equal
steps, the first turn on which the condition fails is computed; else the turns are followed one by
one, up to `FOLLOWED` of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

from jaxdist.hlo.parse import Computation, Instruction, Module
from jaxdist.hlo.scalars import Holds, Moved, TuplePath, Value, compute, is_integer, line, wrapped
from jaxdist.hlo.schedule import CALLED

ArgumentValues = Callable[[int, TuplePath], Value | None]
"""Parameter number and path to its value; None where it is not known."""

FOLLOWED = 4096
"""The most iterations that are followed of a loop whose counters do not move by equal steps.

The length of a longer one is unknown.
"""

_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SAME = ("copy", "copy-start", "copy-done", "bitcast", "reshape", "opt-barrier")
_CONSTANTS = {"true": 1, "false": 0}


def _unknown(number: int, path: TuplePath) -> Value | None:
    return None


CALLS = ("calls", CALLED, "to_apply")
"""Attributes that name the one computation that an instruction runs."""


class Frame:
    """A computation with what is known of its arguments: evaluates integer scalars."""

    def __init__(
        self, module: Module, computation: Computation, arguments: ArgumentValues = _unknown
    ) -> None:
        self.module = module
        self.computation = computation
        self._arguments = arguments
        self._known: dict[tuple[str, TuplePath], Value | None] = {}

    def value(self, name: str, path: TuplePath = ()) -> Value | None:
        """The integer at `path` of what `name` computes; None where it is not known."""
        if (name, path) not in self._known:
            self._known[name, path] = self._evaluated(name, path)
        return self._known[name, path]

    @property
    def result(self) -> Value | None:
        """The value of a computation that gives one integer."""
        return self.value(self.computation.root.name)

    def _evaluated(self, name: str, path: TuplePath) -> Value | None:
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

    def _scalar(self, instruction: Instruction) -> Value | None:
        # Only scalars are followed: arrays would lead through the whole program.
        type_text = instruction.type_text
        if not is_integer(type_text):
            return None
        if instruction.opcode == "constant":
            word = _CONSTANTS.get(instruction.arguments, instruction.arguments)
            return wrapped(int(word), type_text)
        values = [self.value(name) for name in instruction.operands]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        found = re.search(r"\bdirection=(\w+)", instruction.attributes)
        return compute(instruction.opcode, type_text, found and found[1], known)

    def called(self, instruction: Instruction, attribute: str) -> Computation:
        """The computation that an attribute of the instruction names."""
        return self.module.computations[instruction.called(attribute)[0]]

    def enter(self, caller: Instruction) -> Frame:
        """The frame of the computation that a fusion, call, custom call or async-start runs."""
        operands = caller.operands
        attribute = next(one for one in CALLS if caller.called(one))
        return Frame(
            self.module,
            self.called(caller, attribute),
            # On SparseCores an update has the operands of a start that has none.
            lambda number, path: (
                self.value(operands[number], path) if number < len(operands) else None
            ),
        )

    def enter_branch(self, name: str, operand: str) -> Frame:
        """The frame of one branch of a conditional."""
        return Frame(
            self.module, self.module.computations[name], lambda _, path: self.value(operand, path)
        )

    def enter_loop(
        self,
        loop: Instruction,
        attribute: str,
        state: Callable[[TuplePath], Value | None] | None = None,
    ) -> Frame:
        """The frame of a loop's body or condition: invariants are known, and what `state` gives."""
        kept = invariants(self.called(loop, "body"))

        def arguments(number: int, path: TuplePath) -> Value | None:
            if path and path[0] in kept:
                return self.value(loop.operands[0], path)
            return None if state is None else state(path)

        return Frame(self.module, self.called(loop, attribute), arguments)

    def trips(self, loop: Instruction) -> int | None:
        """How often the body of a while loop runs; None if it cannot be told from the program."""
        if found := _TRIP_COUNT.search(loop.attributes):
            return int(found[1])
        moves = self._moves(loop)
        start: dict[TuplePath, int] = {}
        for path in moves:
            first = self.value(loop.operands[0], path)
            if not isinstance(first, int):
                return None
            start[path] = first
        turns = self._by_equal_steps(loop, start, moves)
        return self._followed(loop, start) if turns is None else turns

    def turns(self, loop: Instruction, trips: int) -> Iterator[Frame]:
        """Yield the frame of the body in each turn, with the counters' values where they are known.

        In it a loop can be counted whose length follows from the counters of this one.
        """
        now: Mapping[TuplePath, Value | None] = {
            path: self.value(loop.operands[0], path) for path in self._moves(loop)
        }
        for _ in range(trips):
            body = self.enter_loop(loop, "body", now.get)
            yield body
            now = {path: body.value(body.computation.root.name, path) for path in now}

    def _moves(self, loop: Instruction) -> dict[TuplePath, Value | None]:
        """One iteration's effect on each integer that the condition depends on, even indirectly."""
        asked: dict[TuplePath, None] = {}

        def state(path: TuplePath) -> Value:
            asked[path] = None
            return Moved(path, 0)

        _ = self.enter_loop(loop, "condition", state).result
        body = self.enter_loop(loop, "body", state)
        moves: dict[TuplePath, Value | None] = {}
        while rest := asked.keys() - moves.keys():
            for path in rest:
                moves[path] = body.value(body.computation.root.name, path)
        return moves

    def _by_equal_steps(
        self,
        loop: Instruction,
        start: Mapping[TuplePath, int],
        moves: Mapping[TuplePath, Value | None],
    ) -> int | None:
        """The count of a loop whose counters all move by equal steps; None of any other."""
        lines: dict[TuplePath, Value] = {}
        types = _types(self.called(loop, "body"))
        for path, move in moves.items():
            if not isinstance(move, Moved) or move.path != path or path not in types:
                return None
            lines[path] = line(start[path], move.by, types[path])
        holds = self.enter_loop(loop, "condition", lines.get).result
        if not isinstance(holds, Holds) or holds.turn > holds.until or math.isinf(holds.turn):
            return None
        return int(holds.turn)

    def _followed(self, loop: Instruction, start: Mapping[TuplePath, int]) -> int | None:
        """The count of a loop that ends within `FOLLOWED` turns; None of any other."""
        now: Mapping[TuplePath, Value | None] = start
        for turn in range(FOLLOWED + 1):
            goes_on = self.enter_loop(loop, "condition", now.get).result
            if not isinstance(goes_on, int):
                return None
            if not goes_on:
                return turn
            body = self.enter_loop(loop, "body", now.get)
            root = body.computation.root.name
            now = {path: body.value(root, path) for path in now}
        return None


@lru_cache(maxsize=4096)
def _types(body: Computation) -> dict[TuplePath, str]:
    """The types of the integers in the loop's state that its body takes out."""
    return {
        ()
        if instruction.opcode == "parameter"
        else (instruction.number("index") or 0,): instruction.type_text
        for instruction in body.instructions
        if instruction.opcode in ("get-tuple-element", "parameter")
        and is_integer(instruction.type_text)
    }


@lru_cache(maxsize=4096)
def invariants(body: Computation) -> frozenset[int]:
    """Indices of the loop's state that the body returns unchanged."""
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
