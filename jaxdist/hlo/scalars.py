"""Arithmetic on the integer scalars of a program.

Loops count their iterations with integer scalars, which wrap around at the limits of their dtype. A
scalar may be a known number, or a `Line`, which is a linear function of a loop's iteration. The
comparison of two `Line`s gives the iteration in which a loop's condition first fails, without the
evaluation of earlier iterations.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TuplePath = tuple[int, ...]
"""The indices that lead to an element of nested tuples. There are no indices for a value that is
not a tuple."""

_DTYPE = re.compile(r"(pred|([su])(\d+))\[\]")
_SHIFT_LEFT_MOST = 64


@dataclass(frozen=True)
class Line:
    """An integer whose value is `start + step * turn` in iteration `turn` of a loop.

    The formula is valid up to iteration `until`. In later iterations the integer may wrap around.
    """

    start: int
    step: int
    until: float = math.inf


@dataclass(frozen=True)
class Holds:
    """A condition that first fails in iteration `turn`, if `turn` is at most `until`.

    If `turn` is larger than `until`, the condition holds up to `until`, and nothing is known after.
    """

    turn: float
    until: float = math.inf


@dataclass(frozen=True)
class Moved:
    """The value at `path` of a loop's state at the beginning of an iteration, plus `by`."""

    path: TuplePath
    by: int


Value = int | Line | Holds | Moved


def is_integer(type_text: str) -> bool:
    """Return whether the text of a type denotes an integer or bool scalar.

    >>> is_integer("s32[]"), is_integer("pred[]{:T(128)}"), is_integer("f32[]")
    (True, True, False)
    """
    return _DTYPE.match(type_text) is not None


def wrapped(value: int, type_text: str) -> int:
    """Return an integer wrapped around to the range of a dtype.

    For a bool, the result is 1 for every integer except 0.

    >>> wrapped(130, "s8[]"), wrapped(-1, "u8[]"), wrapped(2, "pred[]")
    (-126, 255, 1)
    """
    low, high = limits(type_text)
    if (low, high) == (0, 1):
        return int(value != 0)
    return (value - low) % (high - low + 1) + low


def limits(type_text: str) -> tuple[int, int]:
    """Return the smallest and the largest value of an integer or bool dtype."""
    found = _DTYPE.match(type_text)
    assert found, f"{type_text} is no integer"
    if found[1] == "pred":
        return 0, 1
    bits = int(found[3])
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if found[2] == "s" else (0, 2**bits - 1)


def scalar_line(start: int, step: int, type_text: str, until: float = math.inf) -> Line:
    """Return a `Line` that is valid until its value leaves the range of a dtype.

    Args:
      start, step: the value in iteration 0, and the difference between iterations.
      type_text: the text of the type.
      until: the last iteration in which the operands of the line are valid.
    """
    low, high = limits(type_text)
    if not low <= start <= high:
        # An `until` of -1 means that the line is valid in no iteration.
        return Line(start, step, -1)
    room = high - start if step > 0 else start - low
    return Line(start, step, min(until, room // abs(step)) if step else until)


def compute(
    opcode: str, type_text: str, direction: str | None, values: Sequence[Value]
) -> Value | None:
    """Return the result of an operation, or None if the result is unknown.

    Args:
      opcode: the name of the operation in HLO.
      type_text: the text of the result's type, which is an integer or bool scalar.
      direction: the name of a comparison's direction in HLO, such as "LT". Other operations have
        the direction None.
      values: the operands of the instruction.

    >>> compute("add", "s8[]", None, [100, 100]), compute("divide", "s32[]", None, [-7, 2])
    (-56, -3)
    >>> compute("compare", "pred[]", "LT", [Line(0, 3), 100])
    Holds(turn=34, until=inf)
    """
    # For a bool, `operator.invert` would give -1 or -2, neither of which is false.
    if opcode == "not" and type_text.startswith("pred"):
        opcode, values = "xor", [*values, 1]
    ints = [value for value in values if isinstance(value, int)]
    if len(ints) == len(values):
        if opcode == "shift-right-logical":
            # For a non-negative integer, Python's arithmetic shift equals the logical shift.
            low, high = limits(type_text)
            opcode, ints = "shift-right-arithmetic", [ints[0] % (high - low + 1), ints[1]]
        table = _COMPARE if opcode == "compare" else _INTEGERS
        apply = table.get(direction or "" if opcode == "compare" else opcode)
        found = apply(*ints) if apply else None
        return None if found is None else wrapped(int(found), type_text)
    if any(isinstance(value, Moved) for value in values):
        return _moved(opcode, values)
    if opcode == "and":
        return _both(values)
    lines = [Line(value, 0) if isinstance(value, int) else value for value in values]
    match opcode, *lines:
        case "compare", Line() as left, Line() as right:
            return _first_failure(direction, left, right)
        case "convert", Line(start, step, until):
            return scalar_line(start, step, type_text, until)
        case _, Line() as left, Line() as right:
            return _combined(opcode, type_text, left, right)
    return None


def _divided(left: int, right: int) -> int | None:
    """Return a quotient rounded towards zero, as in HLO, or None for a division by 0.

    Python's `//` rounds towards minus infinity.
    """
    if right == 0:
        return None
    whole = abs(left) // abs(right)
    return whole if (left < 0) == (right < 0) else -whole


def _remainder(left: int, right: int) -> int | None:
    whole = _divided(left, right)
    return None if whole is None else left - whole * right


def _shifted_left(left: int, right: int) -> int | None:
    return left << right if 0 <= right < _SHIFT_LEFT_MOST else None


_INTEGERS: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": operator.invert,
    "negate": operator.neg,
    "abs": abs,
    "divide": _divided,
    "remainder": _remainder,
    "shift-left": _shifted_left,
    "shift-right-arithmetic": lambda left, right: left >> right if right >= 0 else None,
    "sign": lambda value: (value > 0) - (value < 0),
    "select": lambda which, left, right: left if which else right,
    "clamp": lambda low, value, high: min(max(value, low), high),
    "convert": lambda value: value,
}
_COMPARE: Mapping[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


def _moved(opcode: str, values: Sequence[Value]) -> Moved | None:
    match opcode, *values:
        case "add", Moved(path, by), int(more):
            return Moved(path, by + more)
        case "add", int(more), Moved(path, by):
            return Moved(path, by + more)
        case "subtract", Moved(path, by), int(less):
            return Moved(path, by - less)
    return None


def _both(values: Sequence[Value]) -> Value | None:
    """Return the conjunction of two conditions, which fails as soon as either condition fails.

    The result is None if a value is not a condition.
    """
    left, right = (
        Holds(math.inf if value else 0) if isinstance(value, int) else value for value in values
    )
    if not isinstance(left, Holds) or not isinstance(right, Holds):
        return None
    return Holds(min(left.turn, right.turn), min(left.until, right.until))


def _combined(opcode: str, type_text: str, left: Line, right: Line) -> Line | None:
    until = min(left.until, right.until)
    match opcode:
        case "add":
            return scalar_line(left.start + right.start, left.step + right.step, type_text, until)
        case "subtract":
            return scalar_line(left.start - right.start, left.step - right.step, type_text, until)
        case "multiply" if left.step == 0 or right.step == 0:
            step = left.start * right.step + right.start * left.step
            return scalar_line(left.start * right.start, step, type_text, until)
    return None


def _first_failure(direction: str | None, left: Line, right: Line) -> Holds | None:
    """Return the condition that compares two `Line`s, which are linear in the iteration.

    `Holds.turn` is the iteration in which the condition first fails.

    The result is None for an unknown direction.
    """
    start, step = left.start - right.start, left.step - right.step
    until = min(left.until, right.until)
    if direction in ("GT", "GE"):
        start, step = -start, -step
    if direction in ("LE", "GE"):
        start -= 1
    if direction in ("LT", "LE", "GT", "GE"):
        turn = 0 if start >= 0 else math.inf if step <= 0 else -(start // step)
    elif direction == "NE":
        meets = step != 0 and start % step == 0 and start // step <= 0
        turn = 0 if start == 0 else -(start // step) if meets else math.inf
    elif direction == "EQ":
        turn = 0 if start else 1 if step else math.inf
    else:
        return None
    return Holds(turn, until)
