"""The kinds of values inside `shard_map` along a mesh axis: whole, a shard, a partial sum, ...

A kind says how the values of the devices along the axis make up the value that a single device
would compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar


@dataclass(frozen=True)
class Kind:
    """The relation between the values of the devices along an axis and the value of one device."""

    said: ClassVar[str] = ""

    def __str__(self) -> str:
        return self.said or type(self).__name__.lower()


class Zero(Kind):
    """Zeros (or False) on every device, which may count as a whole value and as a partial sum."""


class Whole(Kind):
    """The value of one device, the same on every device (replicated)."""


@dataclass(frozen=True)
class Shard(Kind):
    """A slice of the value: all devices' slices, joined along a dim, are the value.

    The joined slices may have their rows in another order.

    Attributes:
      dims: the dims along which the slices may be joined: several dims after a reshape that does
        not show which of the new dims is sharded.
      inner: for a merged dim of which the outer part is sharded (batch x sequence), the number of
        elements in the inner part, so that a later split of the dim finds the sharded part.
    """

    dims: frozenset[int]
    inner: int = 1

    def __str__(self) -> str:
        return f"sharded along dim {' or '.join(map(str, sorted(self.dims)))}"


class Count(Kind):
    """A number that is computed from sizes alone: that of the device's rows, or that of all rows.

    The program does not show which of the two a count is. A count that is summed over devices is
    taken to be a partial sum, and any other count to be whole. The comparison of numbers finds
    counts that were taken for the wrong kind.
    """

    said = "computed from sizes alone"


@dataclass(frozen=True)
class Owed(Kind):
    """A partial sum: the value is the sum of all devices' values, which the code still has to add.

    Attributes:
      sure: false if the program does not show whether a sum was over the sharded dim. An error that
        follows from the kind is then undecided.
    """

    sure: bool = True

    said = "a partial sum"


@dataclass(frozen=True)
class Extreme(Kind):
    """A local maximum or minimum: the value is the maximum or minimum of all devices' values.

    Attributes:
      name: "max" or "min".
    """

    name: str

    def __str__(self) -> str:
        return f"a local {self.name}imum"


class Own(Kind):
    """A value that rightfully differs between devices, such as random numbers of a device's key."""

    said = "different on each device"


@dataclass(frozen=True)
class Part(Kind):
    """A value of the device's own, which may leave `shard_map` as its entry of a stack.

    Attributes:
      role: "entry" of a stack with an entry for each device, such as a stage's layers; "tally", a
        sum that began with zeros, of terms that are each computed on a single device; or "message",
        a value between the two marks of a sum that jaxdist takes itself.
    """

    role: str = "entry"

    def __str__(self) -> str:
        return {
            "entry": "this device's own entry of a stack",
            "tally": "a sum of the terms that this device computed",
        }.get(self.role, "a message")


@dataclass(frozen=True)
class Joined(Kind):
    """Arrays of different kinds that are joined in one array, such as a bucket of gradients.

    Attributes:
      dim: the dim along which the arrays are joined.
      parts: pairs of an array's size along `dim` and the array's kind.
    """

    dim: int
    parts: tuple[tuple[int, Kind], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each joined array along `dim`."""
        return tuple(size for size, _ in self.parts)

    said = "arrays of unlike kinds joined in one"


@dataclass(frozen=True)
class Multiple(Kind):
    """A whole value that was summed over the devices, and must be divided by their number.

    Attributes:
      where: file and line of the sum.
    """

    where: str

    said = "a sum over the devices of what is whole on each"


@dataclass(frozen=True)
class Rank(Kind):
    """The device's index along the axis, multiplied by `factor`."""

    factor: int = 1

    said = "computed from the device's index"


@dataclass(frozen=True)
class Unknown(Kind):
    """A value of unknown kind, since no rule applies to an operation.

    Attributes:
      reasons: the reasons, each with a line of code.
    """

    reasons: frozenset[str]

    said = "undecided"


@dataclass(frozen=True)
class Wrong(Kind):
    """A value that is not what one device would compute, because of an error in the code.

    Attributes:
      findings: place and message of each error.
    """

    findings: frozenset[tuple[str, str]]

    said = "wrong"


class Placed(Whole):
    """An array outside of every `shard_map`, which XLA places, and no `shard_map` has computed."""


@dataclass(frozen=True)
class Stacked(Kind):
    """The arrays of all devices, joined along a dim as they left a `shard_map`.

    A later `shard_map` that splits the dim again has the same arrays, such as the residuals that a
    backward pass reads.

    Attributes:
      dim: the dim.
      inner: what a device's array is.
      used: the kind of the joined arrays in any other use.
    """

    dim: int
    inner: Value
    used: Kind


ZERO, WHOLE, COUNT, OWED, OWN = Zero(), Whole(), Count(), Owed(), Own()
PLACED = Placed()
SAME, APART = Whole | Zero | Count, Own | Rank
"""The kinds of values that are the same on every device, and that rightfully are not."""
PART, TALLY, MESSAGE = Part(), Part("tally"), Part("message")
DOUBTFUL = Owed(sure=False)
"""A partial sum of which the program does not show whether it is one."""


@dataclass(frozen=True)
class Value:
    """The kind of an array, and the dims along which all elements of the array are equal.

    A whole array that is constant along a dim may also count as a shard along that dim, as a bias
    that is broadcast over rows.
    """

    kind: Kind
    constant: frozenset[int] = frozenset()

    def of_kind(self, kind: Kind) -> Value:
        """Return a value of another kind with the same constant dims."""
        return replace(self, kind=kind)

    def moved(self, to: Mapping[int, int]) -> Value:
        """Return the value with its dims renumbered, as the function `moved` does for a kind."""
        constant = frozenset(to[dim] for dim in self.constant if dim in to)
        return Value(moved(self.kind, to), constant)


def each(kind: Kind, rule: Callable[[Kind], Kind], by: int = 0) -> Kind:
    """Apply a rule to a kind, or to each of the parts of joined arrays, whose dim moves by `by`."""
    if not isinstance(kind, Joined):
        return rule(kind)
    return merged(kind.dim + by, [(size, rule(part)) for size, part in kind.parts])


def merged(dim: int, parts: Sequence[tuple[int, Kind]]) -> Kind:
    """Return the kind of arrays that are joined along a dim: `Joined`, or the kind of all parts."""
    flat: list[tuple[int, Kind]] = []
    for size, kind in parts:
        flat += kind.parts if isinstance(kind, Joined) and kind.dim == dim else [(size, kind)]
    kinds = {kind for _, kind in flat}
    others = kinds - {ZERO}
    # Zeros may count as any kind, but are merged only with partial sums, so that a later slice
    # which contains only zeros is still known to be zero.
    if len(kinds) == 1 or (len(others) == 1 and others <= {OWED}):
        return (others or kinds).pop()
    return Joined(dim, tuple(flat))


def moved(kind: Kind, to: Mapping[int, int]) -> Kind:
    """Return a kind with its dims renumbered.

    A shard without its dim is the device's own entry of a stack.

    Args:
      kind: the kind.
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


def shard(*dims: int, inner: int = 1) -> Shard:
    """Return the kind of a shard along one of the given dims."""
    return Shard(frozenset(dims), inner)


def doubtful(kind: Kind) -> bool:
    """Return whether a kind, or a part of joined arrays, is `DOUBTFUL`."""
    return kind == DOUBTFUL or (
        isinstance(kind, Joined) and (DOUBTFUL in [part for _, part in kind.parts])
    )


def doubted(kind: Kind) -> Kind:
    """Return a kind in which every partial sum is replaced by `DOUBTFUL`."""
    return each(kind, lambda part: DOUBTFUL if isinstance(part, Owed) else part)


def spoiled(kinds: Iterable[Kind]) -> Kind | None:
    """Return `Wrong` if any kind is wrong, else `Unknown` if any is unknown, else None."""
    kinds = list(kinds)
    # Rules for joined arrays look at each part by itself.
    if any(isinstance(kind, Joined) for kind in kinds):
        return None
    wrong = [kind.findings for kind in kinds if isinstance(kind, Wrong)]
    if wrong:
        return Wrong(frozenset().union(*wrong))
    unknown = [kind.reasons for kind in kinds if isinstance(kind, Unknown)]
    return Unknown(frozenset().union(*unknown)) if unknown else None


def joined(first: Value, second: Value, reason: str) -> Value:
    """Return the kind of a value that has one of two kinds, as after a branch or a loop.

    Args:
      first, second: the value in each of the two branches or iterations.
      reason: the reason for an unknown result, where the two kinds do not agree.
    """
    a, b = first.kind, second.kind
    constant = first.constant & second.constant
    if a == b or isinstance(b, Zero):
        return Value(a, constant)
    if isinstance(a, Zero):
        return Value(b, constant)
    if isinstance(a, Owed) and isinstance(b, Owed):
        return Value(DOUBTFUL, constant)
    if isinstance(a, Shard) and isinstance(b, Shard) and a.dims & b.dims:
        return Value(Shard(a.dims & b.dims, a.inner if a.inner == b.inner else 1), constant)
    if isinstance(a, SAME) and isinstance(b, SAME):
        return Value(WHOLE, constant)
    if {a, b} == {COUNT, OWED}:
        return Value(OWED, constant)
    for one, other, whole in ((a, b, second), (b, a, first)):
        if isinstance(one, Shard) and isinstance(other, Whole) and one.dims & whole.constant:
            return Value(one, constant)
        if one == OWN and isinstance(other, Whole | Shard | Rank):
            return Value(OWN, constant)
        if one == MESSAGE and not spoiled([other]):
            return Value(MESSAGE, constant)
        if isinstance(one, Part) and isinstance(other, Part | Whole | Count | Own | Rank):
            return Value(PART, constant)
    return Value(spoiled((a, b)) or Unknown(frozenset([reason])), constant)
