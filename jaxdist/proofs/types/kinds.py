"""The kinds of values inside `shard_map` along a mesh axis: whole, a shard, a partial sum, ...

A kind describes how the values of the devices along the axis make up the value that a single
device would compute. The docstrings of the kinds call that value "the full value".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar


@dataclass(frozen=True)
class Kind:
    """The relation between the values of the devices along an axis and the full value."""

    said: ClassVar[str] = ""

    def __str__(self) -> str:
        return self.said.format(**vars(self)) or type(self).__name__.lower()


class Zero(Kind):
    """Zeros (or False) on every device, which are both a whole value and a partial sum."""


class Whole(Kind):
    """The full value, which is the same on every device (replicated)."""


@dataclass(frozen=True)
class Shard(Kind):
    """A slice of the full value, which is the concatenation of all devices' slices along a dim.

    The concatenation may have its rows in another order.

    Attributes:
      dims: the dims along which the slices may be concatenated. There are several such dims after a
        reshape that does not show which of the new dims is sharded.
      inner: the number of elements in the inner part of a merged dim, such as batch x sequence, of
        which only the outer part is sharded. A later split of the dim then finds the sharded part.
    """

    dims: frozenset[int]
    inner: int = 1

    def __str__(self) -> str:
        return f"sharded along dim {' or '.join(map(str, sorted(self.dims)))}"


class Count(Kind):
    """A number that is computed from sizes alone, such as a number of rows.

    The program does not show whether the rows of one device or the rows of all devices are counted.
    A count that is summed over devices is taken to be a partial sum, and any other count to be
    whole. If the wrong kind is assumed, the comparison of numbers finds a difference.
    """

    said = "computed from sizes alone"


@dataclass(frozen=True)
class Owed(Kind):
    """A partial sum: the code must still add the values of all devices to get the full value.

    Attributes:
      sure: whether the program shows that the device's sum was over the sharded dim. If the program
        does not, an error that follows from the kind is reported as undecided.
    """

    sure: bool = True

    said = "a partial sum"


@dataclass(frozen=True)
class Extreme(Kind):
    """A local extreme: the full value is the maximum or minimum of all devices' values.

    Attributes:
      name: "max" or "min".
    """

    name: str

    said = "a local {name}imum"


class Own(Kind):
    """A value that may differ between devices, such as random numbers of a device's key."""

    said = "different on each device"


@dataclass(frozen=True)
class Part(Kind):
    """A value that belongs to one device, and may leave `shard_map` as the device's stack entry.

    Attributes:
      role: the text for reports, by which the kinds `PART`, `TALLY`, `MESSAGE` and `CONTRACT`
        differ. A `PART` is from a stack with an entry for each device, such as the layers of a
        pipeline stage. A `TALLY` is a sum that began with zeros; each of its terms is computed on a
        single device. A `MESSAGE` or `CONTRACT` is a value inside code of jaxdist that no rule can
        follow; two marks enclose this code (see `collectives.marked`). A message, such as the
        residual of a codec, may also leave `shard_map` as an entry of a stack.
    """

    role: str

    said = "{role}"


@dataclass(frozen=True)
class Joined(Kind):
    """A concatenation of arrays of different kinds, such as a bucket of gradients.

    Attributes:
      dim: the dim along which the arrays are concatenated.
      parts: pairs of an array's size along `dim` and the array's kind.
    """

    dim: int
    parts: tuple[tuple[int, Kind], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each joined array along `dim`."""
        return tuple(size for size, _ in self.parts)

    said = "a concatenation of arrays of different kinds"


@dataclass(frozen=True)
class Multiple(Kind):
    """A whole value that was summed over the devices, and must be divided by the number of devices.

    Attributes:
      where: the file and line of the sum.
    """

    where: str

    said = "a sum over devices of a value that is complete on each of them"


@dataclass(frozen=True)
class Rank(Kind):
    """A value that is the device's index along the axis, multiplied by `factor`.

    Attributes:
      factor: the factor, which is known from the program.
    """

    factor: int = 1

    said = "computed from the device's index"


@dataclass(frozen=True)
class Unknown(Kind):
    """A value of unknown kind, since no rule applies to an operation.

    Attributes:
      reasons: the reasons, each with the axis and the line of code.
    """

    reasons: frozenset[str]

    said = "undecided"


@dataclass(frozen=True)
class Wrong(Kind):
    """A value that is not what a single device would compute, because of an error in the code.

    Attributes:
      findings: the line of code and the message of each error.
    """

    findings: frozenset[tuple[str, str]]

    said = "wrong"


class Placed(Whole):
    """An array outside of `shard_map` whose value does not depend on any `shard_map`."""


@dataclass(frozen=True)
class Stacked(Kind):
    """An array outside of `shard_map` that joins the arrays of all devices along a dim.

    A later `shard_map` that splits the same dim gets the arrays of the devices back. An example is
    the residuals that a backward pass reads.

    Attributes:
      dim: the dim along which the arrays are joined.
      inner: the value that each device had inside the `shard_map`.
      used: the kind of the joined array for any other use.
    """

    dim: int
    inner: Value
    used: Kind


ZERO, WHOLE, COUNT, OWED, OWN = Zero(), Whole(), Count(), Owed(), Own()
PLACED = Placed()
SAME, APART = Whole | Zero | Count, Own | Rank
"""`SAME` is the union of the kinds that are equal on every device, and `APART` is the union of the
kinds that may differ between devices."""
PART, MESSAGE = Part("this device's own entry of a stack"), Part("a message")
TALLY = Part("a sum of the terms that this device computed")
CONTRACT = Part("a value inside a contract")
DOUBTFUL = Owed(sure=False)
"""The kind of a sum if the program does not show whether the sum is over the sharded dim or over
another dim. Only a sum over the sharded dim is a partial sum."""


@dataclass(frozen=True)
class Value:
    """The kind of an array, and the dims along which all elements of the array are equal.

    A whole array that is constant along a dim also counts as a shard along that dim. An example is
    a bias that is broadcast over rows.

    Attributes:
      kind: the kind of the array.
      constant: the dims along which all elements are equal.
    """

    kind: Kind
    constant: frozenset[int] = frozenset()

    @property
    def held(self) -> frozenset[int]:
        """The dims along which the array is a shard, or counts as a shard."""
        kind = self.kind
        equal = self.constant if isinstance(kind, SAME) else frozenset[int]()
        return kind.dims if isinstance(kind, Shard) else equal

    def of_kind(self, kind: Kind) -> Value:
        """Return a value of another kind with the same constant dims."""
        return replace(self, kind=kind)

    def moved(self, to: Mapping[int, int]) -> Value:
        """Return the value with its dims renumbered.

        Args:
          to: the new number of each dim that remains, as in the function `moved`.
        """
        constant = frozenset(to[dim] for dim in self.constant if dim in to)
        return Value(moved(self.kind, to), constant)

    def resized(self, ndim: int, by: int, at: int = 0) -> Value:
        """Return the value after dims were added or removed.

        Args:
          ndim: the number of dims before.
          by: the number of added dims, which is -1 if a dim was removed.
          at: the first dim that was added, or the dim that was removed.
        """
        to = {dim: dim + by * (dim >= at) for dim in range(ndim) if by >= 0 or dim != at}
        lost = isinstance(self.kind, Joined) and self.kind.dim not in to
        return Value(self.kind) if lost else self.moved(to)


def each(kind: Kind, rule: Callable[[Kind], Kind], by: int = 0) -> Kind:
    """Return the kind that a rule gives for a kind, or for each part of joined arrays.

    Args:
      kind: the kind to which the rule is applied.
      rule: a function from the kind of an operand to the kind of the result.
      by: the number that is added to the dim along which arrays are joined.
    """
    if not isinstance(kind, Joined):
        return rule(kind)
    return concatenated(kind.dim + by, [(size, rule(part)) for size, part in kind.parts])


def concatenated(dim: int, parts: Sequence[tuple[int, Kind]]) -> Kind:
    """Return the kind of arrays that are concatenated along a dim.

    The result is `Joined`, or the common kind if all parts have the same kind. Zeros count as
    partial sums if all other parts are partial sums.

    Args:
      dim: the dim along which the arrays are joined.
      parts: pairs of an array's size along the dim and the array's kind.
    """
    flat: list[tuple[int, Kind]] = []
    for size, kind in parts:
        flat += kind.parts if isinstance(kind, Joined) and kind.dim == dim else [(size, kind)]
    kinds = {kind for _, kind in flat}
    others = kinds - {ZERO}
    # Zeros could be merged with parts of any kind. They are merged only with partial sums: after a
    # merge with any other kind, a later slice that contains only zeros would not be known to be
    # zero.
    if len(kinds) == 1 or (len(others) == 1 and others <= {OWED}):
        return (others or kinds).pop()
    return Joined(dim, tuple(flat))


def moved(kind: Kind, to: Mapping[int, int]) -> Kind:
    """Return a kind with its dims renumbered.

    If no sharded dim remains, the result is `PART`, the device's entry of a stack.

    Args:
      kind: the kind before the dims are renumbered.
      to: the new number of each dim that remains.
    """
    if isinstance(kind, Joined):
        return Joined(to[kind.dim], tuple((size, moved(part, to)) for size, part in kind.parts))
    if isinstance(kind, Stacked):
        return Stacked(to[kind.dim], kind.inner.moved(to), kind.used)
    if not isinstance(kind, Shard):
        return kind
    dims = frozenset(to[dim] for dim in kind.dims if dim in to)
    return Shard(dims, kind.inner) if dims else PART


def shard(*dims: int) -> Shard:
    """Return the kind of a shard along one of the given dims."""
    return Shard(frozenset(dims))


def doubtful(kind: Kind) -> bool:
    """Return whether a kind is `DOUBTFUL`, or has a `DOUBTFUL` part."""
    return DOUBTFUL in ([part for _, part in kind.parts] if isinstance(kind, Joined) else [kind])


def doubted(kind: Kind) -> Kind:
    """Return a kind in which every partial sum is replaced by `DOUBTFUL`."""
    return each(kind, lambda part: DOUBTFUL if isinstance(part, Owed) else part)


def spoiled(kinds: Iterable[Kind]) -> Kind | None:
    """Return `Wrong` if any kind is wrong, else `Unknown` if any is unknown, else None.

    The result has the findings or reasons of all kinds. If any kind is `Joined`, the result is
    None, since rules for joined arrays consider each part separately.
    """
    kinds = list(kinds)
    wrong = [kind.findings for kind in kinds if isinstance(kind, Wrong)]
    unknown = [kind.reasons for kind in kinds if isinstance(kind, Unknown)]
    if any(isinstance(kind, Joined) for kind in kinds) or not (wrong or unknown):
        return None
    return Wrong(frozenset().union(*wrong)) if wrong else Unknown(frozenset().union(*unknown))


def passes(kinds: Sequence[Kind]) -> Kind | None:
    """Return the kind of all results of an operation if a single operand decides this kind.

    If an operand is wrong, unknown, a message, or a value inside a contract, the results of every
    operation have the kind of this operand. The result is None if no operand has such a kind.

    Args:
      kinds: the kinds of the operands.
    """
    return spoiled(kinds) or next((kind for kind in (CONTRACT, MESSAGE) if kind in kinds), None)


def joined(first: Value, second: Value, otherwise: Kind) -> Value:
    """Return the value of a branch or a loop, which may be either of two values.

    Args:
      first, second: the values from the two branches or iterations.
      otherwise: the kind of the result if the two kinds do not agree.
    """
    return Value(_joined(first, second, otherwise), first.constant & second.constant)


def _joined(first: Value, second: Value, otherwise: Kind) -> Kind:
    a, b = first.kind, second.kind
    if a == b or isinstance(b, Zero):
        return a
    if isinstance(a, Zero):
        return b
    if isinstance(a, Owed) and isinstance(b, Owed):
        return DOUBTFUL
    if isinstance(a, Shard) and isinstance(b, Shard) and a.dims & b.dims:
        return Shard(a.dims & b.dims, a.inner if a.inner == b.inner else 1)
    if isinstance(a, SAME) and isinstance(b, SAME):
        return WHOLE
    if {a, b} == {COUNT, OWED}:
        return OWED
    if sent := passes((a, b)):
        return sent
    for one, other in ((first, second), (second, first)):
        if isinstance(one.kind, Shard) and isinstance(other.kind, Whole) and one.held & other.held:
            return one.kind
        if one.kind == OWN and isinstance(other.kind, Whole | Shard | Rank):
            return OWN
        if isinstance(one.kind, Part) and isinstance(other.kind, Part | Whole | Count | Own | Rank):
            return PART
    return otherwise
