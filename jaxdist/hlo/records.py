"""The records of a ledger, frozen dataclasses that describe a compiled program."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from jaxdist.types import JsonObject

CollectiveKind = Literal[
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
]


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective instruction; bytes are per device and per execution."""

    name: str
    """The instruction's name in the program."""
    kind: CollectiveKind
    """The kind of collective; TPU's fused reduce-scatter counts as a reduce-scatter."""
    dtypes: tuple[str, ...]
    """The dtype sent for each combined operand, in HLO's spelling (`f32`, `bf16`, `s8`)."""
    payload_bytes: int
    """The bytes of the full, unscattered tensor: the result of an all-gather, otherwise the
    operands."""
    axes: tuple[str, ...] | None
    """Mesh axes that the groups span, in mesh order; None when they are not a product of axes."""
    group_size: int
    """The number of devices that take part; for a permute, the size of the axes along which it
    moves."""
    groups: tuple[tuple[int, ...], ...]
    """Positions in the program's device assignment; for a permute, its (source, target) pairs."""
    times_low: int
    """The least number of executions per run of the program."""
    times_high: int
    """The largest number of executions per run if `bounded`; above `times_low` in a conditional."""
    sent_bytes: float
    """Bytes that the busiest device sends in an execution, by the standard algorithm of `kind`."""
    is_async: bool
    """Whether it is a start/done pair."""
    overlapped: bool
    """Whether compute is scheduled between start and done."""
    source: str
    """The jax operation of its origin (`op_name` of the metadata), or empty."""
    bounded: bool = True
    """False inside a loop of unknown length, whose single iteration is counted in `times_high`."""
    array_bytes: tuple[int, ...] = ()
    """The part of `payload_bytes` of each combined operand."""

    @property
    def times(self) -> str:
        """The executions as text; without a bound of the loop there is no upper end."""
        if not self.bounded:
            return f"{self.times_low:,} or more"
        if self.times_low == self.times_high:
            return f"{self.times_high:,}"
        return f"{self.times_low:,}-{self.times_high:,}"


@dataclasses.dataclass(frozen=True)
class Memory:
    """The bytes on a device, from XLA's buffer assignment."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """The part of the outputs that is stored in donated arguments."""
    temp_bytes: int
    code_bytes: int
    peak_bytes: int
    """The memory that is required: arguments, unaliased outputs, temporaries, and more on TPU."""


@dataclasses.dataclass(frozen=True)
class Ledger:
    """A description of everything that a run of a compiled program does on each device."""

    collectives: tuple[Collective, ...]
    flops_low: float
    """FLOPs of a device: dots and convolutions, 2 per multiply-add, loops multiplied out."""
    flops_high: float
    """FLOPs with the most expensive branch of each conditional."""
    memory: Memory
    devices: int
    """The number of devices of the program."""
    axes: dict[str, int]
    """The size of each mesh axis."""
    unknown_loops: tuple[str, ...] = ()
    """Loops whose length only a run would show: their content counts from 0 to 1 times, so that no
    upper figure is a bound."""

    def sent_bytes(self, axis: str | None = None) -> float:
        """Sum the bytes that a device sends in a run; only over groups within `axis` if given.

        It is an upper bound, unless there are `unknown_loops`, counted as a single iteration. A
        collective over several axes counts in full for each of them.
        """
        return math.fsum(
            collective.times_high * collective.sent_bytes
            for collective in self.collectives
            if axis is None or axis in (collective.axes or ())
        )

    def count(self, kind: CollectiveKind) -> int:
        """Count executions of collectives of `kind` in a run; a bound, as in `sent_bytes`."""
        return sum(c.times_high for c in self.collectives if c.kind == kind)

    def to_json(self) -> JsonObject:
        """Convert the records to plain dicts, lists, numbers and strings."""
        return dataclasses.asdict(self)
