"""The records of a ledger: frozen dataclasses that describe a compiled program."""

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
    """Mesh axes that the groups span, in mesh order, or None if no axes multiply to them."""
    group_size: int
    """The number of devices in a group; for a permute, the product of the sizes of `axes`."""
    groups: tuple[tuple[int, ...], ...]
    """The groups as positions in the program's device assignment; a permute has (source, target)
    pairs."""
    times_low: int
    """The least number of executions per run of the program."""
    times_high: int
    """The largest number of executions per run, where `bounded` is true; in a conditional it
    exceeds `times_low`."""
    sent_bytes: float
    """Bytes that the busiest device sends in an execution, by the standard algorithm of `kind`."""
    is_async: bool
    """Whether the collective is asynchronous, a pair of a start and a done."""
    overlapped: bool
    """Whether compute is scheduled between start and done."""
    source: str
    """The jax operation of the collective (`op_name` of the metadata), or '' without metadata."""
    bounded: bool = True
    """False inside a loop of unknown length, of which `times_high` counts a single iteration."""
    array_bytes: tuple[int, ...] = ()
    """The bytes of each combined operand, which add up to `payload_bytes`."""

    @property
    def times(self) -> str:
        """The number of executions as text, which is a range for a collective in a conditional."""
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
    """The required memory: arguments, outputs that do not reuse arguments, temporaries, and on TPU
    also memory that XLA does not list."""


@dataclasses.dataclass(frozen=True)
class Ledger:
    """A description of everything that a run of a compiled program does on each device."""

    collectives: tuple[Collective, ...]
    flops_low: float
    """FLOPs of a device in dots and convolutions, 2 per multiply-add and times the iterations of
    loops, with the cheapest branch of each conditional."""
    flops_high: float
    """FLOPs of a device with the most expensive branch of each conditional."""
    memory: Memory
    devices: int
    """The number of devices of the program."""
    axes: dict[str, int]
    """The size of each mesh axis."""
    unknown_loops: tuple[str, ...] = ()
    """Loops whose length only a run would show. A loop of unknown length counts as 0 to 1
    iterations, so that the upper figures are not bounds."""

    def sent_bytes(self, axis: str | None = None) -> float:
        """Return the bytes that a device sends in a run, over all axes or those of one `axis`.

        The sum is an upper bound, unless there are `unknown_loops`, which count as a single
        iteration. A collective over several axes counts in full for each of them.
        """
        return math.fsum(
            collective.times_high * collective.sent_bytes
            for collective in self.collectives
            if axis is None or axis in (collective.axes or ())
        )

    def count(self, kind: CollectiveKind) -> int:
        """Count the executions of a kind of collective in a run; a bound, as in `sent_bytes`."""
        return sum(c.times_high for c in self.collectives if c.kind == kind)

    def to_json(self) -> JsonObject:
        """Convert the records to plain dicts, lists, numbers and strings."""
        return dataclasses.asdict(self)
