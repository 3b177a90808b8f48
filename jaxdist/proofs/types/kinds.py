"""The kinds of values inside `shard_map` along a mesh axis: whole, a shard, a sum still owed, ...

The question of every kind is the same: how do the values that the devices along the axis hold
make up the value that a single device would compute?
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Kind:
    """The relation between the devices' values and the value of one device."""

    def __str__(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Zero(Kind):
    """Zeros (or False) on every device: whole, and a sum to which nothing was added."""


@dataclass(frozen=True)
class Whole(Kind):
    """The value itself, the same on every device."""


@dataclass(frozen=True)
class Shard(Kind):
    """A slice: the devices' values, joined along a dim, are the value up to the order of its rows.

    Attributes:
      dims: the dims along which the slices may be joined. More than one where a dim was split and
        nothing has yet shown which of its parts is meant.
      inner: the number of elements inside the sharded part of a merged dim (the sequence, in
        batch x sequence), so that splitting the dim again finds the part.
    """

    dims: frozenset[int]
    inner: int = 1

    def __str__(self) -> str:
        return f"sharded along dim {' or '.join(map(str, sorted(self.dims)))}"


@dataclass(frozen=True)
class Count(Kind):
    """A number that follows from a size alone: of the device's rows, or of all there are.

    Nothing in the program says which. It is taken for a term where it is summed over the devices,
    and for whole elsewhere; the comparison of numbers finds the wrong one.
    """

    def __str__(self) -> str:
        return "computed from sizes alone"


@dataclass(frozen=True)
class Terms(Kind):
    """A row of an array whose rows are the devices' partial sums, side by side.

    Attributes:
      dim: the dim of size 1.
    """

    dim: int

    def __str__(self) -> str:
        return "a row with this device's partial sum"


@dataclass(frozen=True)
class Owed(Kind):
    """A term: the value is the sum of the devices' values, which is still owed.

    Attributes:
      sure: false where the sum may be over another dim than the sharded dim, of which the program
        does not say enough: then an error that would follow is undecided.
    """

    sure: bool = True

    def __str__(self) -> str:
        return "a partial sum"


@dataclass(frozen=True)
class Extreme(Kind):
    """A local maximum or minimum: the value is that of the devices' values.

    Attributes:
      name: "max" or "min".
    """

    name: str

    def __str__(self) -> str:
        return f"a local {self.name}imum"


@dataclass(frozen=True)
class Own(Kind):
    """Each device's own, by right: random numbers from a key of its own, a flag about its shard."""

    def __str__(self) -> str:
        return "different on each device"


@dataclass(frozen=True)
class Part(Kind):
    """The device's own entry of a stack with an entry for each device: a stage's layers, say.

    It is right by itself, and as an entry of a stack again; what devices do to each other's entries
    is not followed.
    """

    def __str__(self) -> str:
        return "this device's own entry of a stack"


@dataclass(frozen=True)
class Joined(Kind):
    """Arrays of unlike kinds in one: a bucket of gradients, from which slices are taken again.

    Attributes:
      dim: along which they are joined.
      parts: size along that dim, and kind, of each.
    """

    dim: int
    parts: tuple[tuple[int, Kind], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each part."""
        return tuple(size for size, _ in self.parts)

    def __str__(self) -> str:
        return "arrays of unlike kinds joined in one"


@dataclass(frozen=True)
class Multiple(Kind):
    """A whole value that was summed over the devices: right once it is divided by their number.

    Attributes:
      where: file and line of the sum.
    """

    where: str

    def __str__(self) -> str:
        return "a sum over the devices of what is whole on each"


@dataclass(frozen=True)
class Rank(Kind):
    """The device's index along the axis, times a factor."""

    factor: int = 1

    def __str__(self) -> str:
        return "computed from the device's index"


@dataclass(frozen=True)
class Unknown(Kind):
    """Not decided: no rule knows the operation.

    Attributes:
      reasons: why, each with its line of code.
    """

    reasons: frozenset[str]

    def __str__(self) -> str:
        return "undecided"


@dataclass(frozen=True)
class Wrong(Kind):
    """Not what one device computes, whatever follows.

    Attributes:
      findings: place and message of each finding that made it wrong.
    """

    findings: frozenset[tuple[str, str]]

    def __str__(self) -> str:
        return "wrong"


ZERO, WHOLE, COUNT, OWED, OWN, PART = Zero(), Whole(), Count(), Owed(), Own(), Part()
DOUBTFUL = Owed(sure=False)


@dataclass(frozen=True)
class Value:
    """The kind of an array, and the dims along which all its elements are equal.

    A whole array that is constant along a dim may be read as a shard along it: a bias that was
    broadcast over rows, say.
    """

    kind: Kind
    constant: frozenset[int] = frozenset()

    def of_kind(self, kind: Kind) -> Value:
        """The same with another kind."""
        return replace(self, kind=kind)


def shard(*dims: int, inner: int = 1) -> Shard:
    """A shard along one of these dims."""
    return Shard(frozenset(dims), inner)


def doubtful(kind: Kind) -> bool:
    """Whether a partial sum, or one that is part of it, is doubtful."""
    if isinstance(kind, Joined):
        return any(doubtful(part) for _, part in kind.parts)
    return kind == DOUBTFUL


def doubted(kind: Kind) -> Kind:
    """The same kind, where each partial sum is doubtful."""
    if isinstance(kind, Joined):
        return Joined(kind.dim, tuple((size, doubted(part)) for size, part in kind.parts))
    return DOUBTFUL if isinstance(kind, Owed) else kind


def spoiled(kinds: Iterable[Kind]) -> Kind | None:
    """The kind that wins over all others: wrong, then undecided; None where all are decided."""
    kinds = list(kinds)
    if any(isinstance(kind, Joined) for kind in kinds):
        return None
    wrong = [kind.findings for kind in kinds if isinstance(kind, Wrong)]
    if wrong:
        return Wrong(frozenset().union(*wrong))
    unknown = [kind.reasons for kind in kinds if isinstance(kind, Unknown)]
    return Unknown(frozenset().union(*unknown)) if unknown else None


def joined(first: Value, second: Value, reason: str) -> Value:
    """Give the kind of a value that may be either: from two branches, or two passes of a loop.

    Args:
      reason: why the result is undecided, where the two do not agree.
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
    if {a, b} == {COUNT, WHOLE} or {a, b} == {COUNT, OWED}:
        return Value(a if b == COUNT else b, constant)
    for one, other, whole in ((a, b, second), (b, a, first)):
        if isinstance(one, Shard) and isinstance(other, Whole) and one.dims & whole.constant:
            return Value(one, constant)
        if isinstance(one, Own) and isinstance(other, Whole | Shard | Rank):
            return Value(OWN, constant)
        if isinstance(one, Part) and isinstance(other, Whole | Count | Own | Rank):
            return Value(PART, constant)
    return Value(spoiled((a, b)) or Unknown(frozenset([reason])), constant)
