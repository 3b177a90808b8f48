"""The number of iterations of a loop, which XLA states or which is computed from the loop.

XLA:TPU drops `known_trip_count` from the compiled program. The number is then computed from the
integer scalars on which the condition depends, and from their initial values. If the body changes
each of these scalars by a constant step, the condition is evaluated for many iterations at once.
For other loops, up to `FOLLOWED` iterations are evaluated one after another.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

import numpy as np

from jaxdist.hlo.parse import Computation, Instruction, Module
from jaxdist.hlo.scalars import Moved, TuplePath, Value, compute, is_integer, wrapped

ArgumentValues = Callable[[int, TuplePath], Value | None]
"""A function from the number of a parameter and a path in the parameter to the value at the path,
or to None if the value is unknown."""

AT_ONCE = (2**8, 2**14, 2**20)
"""The numbers of iterations for which the condition of a loop with constant steps is evaluated at
once: the first number, then the next, until the condition fails. The length of a longer loop counts
as unknown."""
FOLLOWED = 4096
"""The largest number of iterations that are evaluated one after another. The length of a loop with
more iterations counts as unknown."""

_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SAME = ("copy", "copy-start", "copy-done", "bitcast", "reshape", "opt-barrier")
_CONSTANTS = {"true": 1, "false": 0}


def _unknown(number: int, path: TuplePath) -> Value | None:
    return None


class Frame:
    """An evaluator of the integer scalars in a computation, given the values of its arguments."""

    def __init__(
        self, module: Module, computation: Computation, arguments: ArgumentValues = _unknown
    ) -> None:
        self.module = module
        self.computation = computation
        self._arguments = arguments
        self._known: dict[tuple[str, TuplePath], Value | None] = {}

    def value(self, name: str, path: TuplePath = ()) -> Value | None:
        """Return the integer at `path` in the result of instruction `name`, or None if unknown."""
        if (name, path) not in self._known:
            self._known[name, path] = self._evaluated(name, path)
        return self._known[name, path]

    def result(self, path: TuplePath = ()) -> Value | None:
        """Return the integer at `path` in the computation's result, or None if it is unknown."""
        return self.value(self.computation.root.name, path)

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
            return self.enter(instruction).result(path)
        return self._scalar(instruction)

    def _scalar(self, instruction: Instruction) -> Value | None:
        # Only scalars are evaluated. The operands of arrays would lead through the entire program.
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
        """Return the computation that an attribute of the instruction names."""
        return self.module.computations[instruction.called(attribute)[0]]

    def enter(self, caller: Instruction) -> Frame:
        """Return the frame of the computation that a fusion, call or asynchronous start calls.

        A custom call may call a computation too.
        """
        operands = caller.operands
        return Frame(
            self.module,
            self.module.computations[caller.callee],
            # The start of work on SparseCores has no operands; a later update passes the operands.
            lambda number, path: (
                self.value(operands[number], path) if number < len(operands) else None
            ),
        )

    def enter_branch(self, name: str, operand: str) -> Frame:
        """Return the frame of a branch of a conditional.

        Args:
          name: the name of the branch's computation.
          operand: the name of the branch's operand.
        """
        return Frame(
            self.module, self.module.computations[name], lambda _, path: self.value(operand, path)
        )

    def enter_loop(
        self,
        loop: Instruction,
        attribute: str,
        state: Callable[[TuplePath], Value | None] | None = None,
    ) -> Frame:
        """Return the frame of a loop's body or condition.

        Args:
          loop: the while instruction.
          attribute: `body` or `condition`.
          state: a function from a path in the loop's state to the value at the path, for values
            that the body changes. If None, these values are unknown. Values that the body returns
            unchanged are taken from the loop's operand.
        """
        kept = invariants(self.called(loop, "body"))

        def arguments(number: int, path: TuplePath) -> Value | None:
            if path and path[0] in kept:
                return self.value(loop.operands[0], path)
            return None if state is None else state(path)

        return Frame(self.module, self.called(loop, attribute), arguments)

    def trips(self, loop: Instruction) -> int | None:
        """Return a while loop's number of iterations, or None if it cannot be computed."""
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
        """Yield the frame of a loop's body for each of its `trips` iterations.

        The values of the loop's counters are known in the frame, so that the length of an inner
        loop that depends on the counters can be computed.
        """
        start = {path: self.value(loop.operands[0], path) for path in self._moves(loop)}
        for now in itertools.islice(self._states(loop, start), trips):
            yield self.enter_loop(loop, "body", now.get)

    def _states(
        self, loop: Instruction, now: Mapping[TuplePath, Value | None]
    ) -> Iterator[Mapping[TuplePath, Value | None]]:
        """Yield the values of a loop's counters before each iteration, without end.

        Args:
          loop: the while instruction.
          now: the values before the first iteration.
        """
        while True:
            yield now
            body = self.enter_loop(loop, "body", now.get)
            now = {path: body.result(path) for path in now}

    def _moves(self, loop: Instruction) -> dict[TuplePath, Value | None]:
        """Return the integers on which the condition depends, with their values after an iteration.

        The key is the path of an integer in the loop's state. A value is a function of the state
        before the iteration, or None if the value is unknown.
        """
        # A dict has a fixed order, but the order of a set may differ between runs.
        asked: dict[TuplePath, None] = {}

        def state(path: TuplePath) -> Value:
            asked[path] = None
            return Moved(path, 0)

        _ = self.enter_loop(loop, "condition", state).result()
        body = self.enter_loop(loop, "body", state)
        moves: dict[TuplePath, Value | None] = {}
        # A counter may depend on integers of the loop's state that are not in `asked` yet.
        # `body.value` then adds these integers to `asked`, and the loop below computes them too.
        while rest := asked.keys() - moves.keys():
            for path in rest:
                moves[path] = body.result(path)
        return moves

    def _by_equal_steps(
        self,
        loop: Instruction,
        start: Mapping[TuplePath, int],
        moves: Mapping[TuplePath, Value | None],
    ) -> int | None:
        """Return the number of iterations of a loop whose counters change by constant steps.

        The result is None for other loops, and above the largest number of iterations in `AT_ONCE`.

        Args:
          loop: the while instruction.
          start: the initial values of the counters.
          moves: the values of the counters after an iteration, or None for an unknown value.
        """
        types = _types(self.called(loop, "body"))
        steps = {
            path: move.by
            for path, move in moves.items()
            if isinstance(move, Moved) and move.path == path and path in types
        }
        if len(steps) < len(moves):
            return None
        for count in AT_ONCE:
            turns = np.arange(count, dtype=object)
            now = {
                path: wrapped(start[path] + step * turns, types[path])
                for path, step in steps.items()
            }
            holds = self.enter_loop(loop, "condition", now.get).result()
            if not isinstance(holds, np.ndarray):
                return None
            if not holds.all():
                return int(np.argmin(holds))
        return None

    def _followed(self, loop: Instruction, start: Mapping[TuplePath, int]) -> int | None:
        """Return the number of iterations of a loop by evaluating one iteration after another.

        The result is None if there are more than `FOLLOWED` iterations, or if the condition cannot
        be computed.
        """
        for turn, now in enumerate(itertools.islice(self._states(loop, start), FOLLOWED + 1)):
            goes_on = self.enter_loop(loop, "condition", now.get).result()
            if not isinstance(goes_on, int):
                return None
            if not goes_on:
                return turn
        return None


@lru_cache(maxsize=4096)
def _types(body: Computation) -> dict[TuplePath, str]:
    """Return, by path, the types of those integers in a loop's state that the body reads."""
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
    """Return the indices of the elements of a loop's state that its body returns unchanged."""
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
