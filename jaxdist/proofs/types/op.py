"""The interface of all rules: an operation of a program, with the kinds of its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jaxdist.proofs.types import kinds as k
from jaxdist.proofs.types.jaxprs import axes_over


@dataclass(frozen=True)
class Op:
    """An equation, with what its operands are along the axis of a `Pass`.

    Attributes:
      at: the pass.
      eqn: the equation.
      values: the operands.
    """

    at: Any
    eqn: Any
    values: Sequence[k.Value]

    @cached_property
    def name(self) -> str:
        """The name of the primitive."""
        return str(self.eqn.primitive.name)

    @cached_property
    def kinds(self) -> list[k.Kind]:
        """The kinds of the operands."""
        return [value.kind for value in self.values]

    @cached_property
    def ins(self) -> list[Any]:
        """The shapes of the operands."""
        return [var.aval for var in self.eqn.invars]

    @cached_property
    def out(self) -> Any:
        """The shape of the first result."""
        return self.eqn.outvars[0].aval

    @property
    def params(self) -> Any:
        """The parameters of the equation."""
        return self.eqn.params

    @property
    def every(self) -> frozenset[int]:
        """All dims of the first result, as the dims along which a constant array is constant."""
        return frozenset(range(self.out.ndim))

    @property
    def over(self) -> tuple[str, ...]:
        """The mesh axes that a collective spans."""
        return axes_over(self.eqn)

    def has(self, kind: Any) -> bool:
        """Return whether an operand is of a class of kinds."""
        return any(isinstance(one, kind) for one in self.kinds)

    def all(self, kind: Any) -> bool:
        """Return whether all operands are of a class of kinds."""
        return all(isinstance(one, kind) for one in self.kinds)

    def of(self, values: Sequence[k.Value]) -> Op:
        """Return the operation with other operands."""
        return replace(self, values=values)

    def wrong(self, message: str) -> k.Kind:
        """Report an error, in which `AXIS` means the axis; return the kind of the results."""
        return self.at.wrong(self.eqn, message.replace("AXIS", repr(self.at.axis)))

    def undecided(self, message: str) -> k.Kind:
        """Return `Unknown`, the kind of a result to which no rule applies, with the reason."""
        return self.at.undecided(self.eqn, message)


Found = k.Kind | k.Value | list[k.Value]
"""The results of an operation: a kind or a value that all have, or each by itself."""
Rule = Callable[[Op], Found]
"""A function from an operation to the kinds of its results."""
