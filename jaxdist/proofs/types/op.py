"""The interface of all rules: an operation of a program with the kinds of its operands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jaxdist.proofs.types import kinds as k
from jaxdist.proofs.types.jaxprs import axes_over


@dataclass(frozen=True)
class Op:
    """An equation of a program, with the values of its operands along the axis of a `Pass`.

    Attributes:
      at: the pass, which follows values along one mesh axis.
      eqn: the equation.
      values: the operands.
      name: the name of the primitive.
      ins: the shapes and dtypes of the operands.
      over: the mesh axes that a collective spans.
    """

    at: Any
    eqn: Any
    values: Sequence[k.Value]
    name: str
    ins: Sequence[Any]
    over: Collection[str]

    @cached_property
    def kinds(self) -> list[k.Kind]:
        """The kinds of the operation's operands."""
        return [value.kind for value in self.values]

    @cached_property
    def out(self) -> Any:
        """The shape and dtype of the operation's first result."""
        return self.eqn.outvars[0].aval

    @property
    def params(self) -> Any:
        """The parameters of the jax equation from which the operation was made."""
        return self.eqn.params

    @property
    def every(self) -> frozenset[int]:
        """The indices of all dims of the operation's first result."""
        return frozenset(range(self.out.ndim))

    def has(self, kind: Any) -> bool:
        """Return whether any operand has a kind of the given class."""
        return any(isinstance(one, kind) for one in self.kinds)

    def all(self, kind: Any) -> bool:
        """Return whether all operands have kinds of the given class."""
        return all(isinstance(one, kind) for one in self.kinds)

    def of(self, values: Sequence[k.Value], **changed: Any) -> Op:
        """Return the operation on other operands, in which other attributes may be changed too."""
        return replace(self, values=values, **changed)

    def wrong(self, message: str) -> k.Kind:
        """Report an error and return `Wrong`, the kind of the results.

        Args:
          message: the error, in which `AXIS` is replaced with the name of the axis.
        """
        return self.at.wrong(self.eqn, message.replace("AXIS", repr(self.at.axis)))

    def undecided(self, message: str) -> k.Kind:
        """Return the kind `Unknown` with the reason why no rule applies."""
        return self.at.undecided(self.eqn, message)

    def no_rule(self, what: str) -> k.Kind:
        """Return the kind `Unknown` with the reason that no rule covers an operation."""
        return self.undecided(f"no rule covers {what}")


def op_of(at: Any, eqn: Any, values: Sequence[k.Value]) -> Op:
    """Return the `Op` of an equation, with the values of its operands."""
    name, ins = str(eqn.primitive.name), [var.aval for var in eqn.invars]
    return Op(at, eqn, values, name, ins, axes_over(eqn))


Found = k.Kind | k.Value | list[k.Value]
"""The results of an operation: a kind or value that all results share, or a list with the value of
each result."""
Rule = Callable[[Op], Found]
"""A function from an operation to the kinds of its results."""
