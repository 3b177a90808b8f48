"""Arithmetic on the integer scalars of a program.

Loops count their iterations with integer scalars, which wrap around at the limits of their dtype. A
scalar is a known number, an array of its values in many iterations of a loop, or a `Moved`, which
is the change of a number in an iteration.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TuplePath = tuple[int, ...]
"""The indices that lead to an element of nested tuples. There are no indices for a value that is
not a tuple."""

_DTYPE = re.compile(r"(pred|([su])(\d+))\[\]")
_SHIFT_LEFT_MOST = 64


@dataclass(frozen=True)
class Moved:
    """The value at `path` of a loop's state at the beginning of an iteration, plus `by`."""

    path: TuplePath
    by: int


Value = int | np.ndarray | Moved
"""A number, the numbers in successive iterations of a loop (an array of Python's integers, which
have no limits), or a change."""


def is_integer(type_text: str) -> bool:
    """Return whether the text of a type denotes an integer or bool scalar.

    >>> is_integer("s32[]"), is_integer("pred[]{:T(128)}"), is_integer("f32[]")
    (True, True, False)
    """
    return _DTYPE.match(type_text) is not None


def wrapped(value: Any, type_text: str) -> Any:
    """Return an integer, or an array of integers, wrapped around to the range of a dtype.

    For a bool, the result is 1 for every integer except 0.

    >>> wrapped(130, "s8[]"), wrapped(-1, "u8[]"), wrapped(2, "pred[]")
    (-126, 255, 1)
    """
    low, high = limits(type_text)
    if (low, high) == (0, 1):
        return (value != 0) * 1
    return (value - low) % (high - low + 1) + low


def limits(type_text: str) -> tuple[int, int]:
    """Return the smallest and the largest value of an integer or bool dtype."""
    found = _DTYPE.match(type_text)
    assert found, f"{type_text} is no integer"
    if found[1] == "pred":
        return 0, 1
    bits = int(found[3])
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if found[2] == "s" else (0, 2**bits - 1)


def compute(
    opcode: str, type_text: str, direction: str | None, values: Sequence[Any]
) -> Value | None:
    """Return the result of an operation, or None if the result is unknown.

    Args:
      opcode: the name of the operation in HLO.
      type_text: the text of the result's type, which is an integer or bool scalar.
      direction: the name of a comparison's direction in HLO, such as "LT". Other operations have
        the direction None.
      values: the operands of the instruction, each a `Value`.

    >>> compute("add", "s8[]", None, [100, 100]), compute("divide", "s32[]", None, [-7, 2])
    (-56, -3)
    >>> compute("compare", "pred[]", "LT", [3 * np.arange(3, dtype=object), 4])
    array([1, 1, 0])
    """
    if any(isinstance(value, Moved) for value in values):
        return _moved(opcode, values)
    # For a bool, `operator.invert` would give -1 or -2, neither of which is false.
    if opcode == "not" and type_text.startswith("pred"):
        opcode, values = "xor", [*values, 1]
    if opcode == "shift-right-logical":
        # For a non-negative integer, Python's arithmetic shift equals the logical shift.
        low, high = limits(type_text)
        opcode, values = "shift-right-arithmetic", [values[0] % (high - low + 1), values[1]]
    apply = _COMPARE.get(direction or "") if opcode == "compare" else _INTEGERS.get(opcode)
    if apply is None:
        return None
    if any(isinstance(value, np.ndarray) for value in values):
        apply = np.frompyfunc(apply, len(values), 1)
    found = apply(*values)
    return None if found is None or None in np.ravel(found) else wrapped(found, type_text)


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
