"""What the ledger says about one compiled program: plain frozen records."""

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
    """One collective instruction; bytes are per device and per execution."""

    name: str
    """The instruction's name in the program."""
    kind: CollectiveKind
    """What it does; TPU's fused reduce-scatter counts as a reduce-scatter."""
    dtypes: tuple[str, ...]
    """Dtype on the wire of each combined operand, in HLO's spelling (`f32`, `bf16`, `s8`)."""
    payload_bytes: int
    """The full, unscattered tensor: the result of an all-gather, the operands of the others."""
    axes: tuple[str, ...] | None
    """Mesh axes that the groups span, in mesh order; None when they are no product of axes."""
    group_size: int
    """Devices that take part together; for a permute, the size of the axes it moves along."""
    groups: tuple[tuple[int, ...], ...]
    """Positions in the program's device assignment; for a permute, its (source, target) pairs."""
    times_low: int
    """Executions per run of the program, at least."""
    times_high: int
    """Executions per run, at most where `bounded`: more than `times_low` inside a conditional."""
    sent_bytes: float
    """What the busiest device sends in one execution, by the standard algorithm of `kind`."""
    is_async: bool
    """Whether it is a start/done pair."""
    overlapped: bool
    """Whether compute is scheduled between start and done."""
    source: str
    """The jax operation it came from (`op_name` of the metadata), or empty."""
    bounded: bool = True
    """False inside a loop of unknown length, of which `times_high` counts one turn."""
    array_bytes: tuple[int, ...] = ()
    """Of `payload_bytes`, those of each combined operand."""

    @property
    def times(self) -> str:
        """Executions in words; a count that no loop bounds has no upper end."""
        if not self.bounded:
            return f"{self.times_low:,} or more"
        if self.times_low == self.times_high:
            return f"{self.times_high:,}"
        return f"{self.times_low:,}-{self.times_high:,}"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, from XLA's buffer assignment."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Of the outputs, what lives in donated arguments."""
    temp_bytes: int
    code_bytes: int
    peak_bytes: int
    """What must fit: arguments, outputs that are not aliases, temporaries, and more on TPU."""


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Everything that one run of a compiled program does on each device."""

    collectives: tuple[Collective, ...]
    flops_low: float
    """FLOPs of one device: dots and convolutions, 2 per multiply-add, loops multiplied out."""
    flops_high: float
    """The same with the dearest branch of each conditional."""
    memory: Memory
    devices: int
    """Devices that the program runs on."""
    axes: dict[str, int]
    """Mesh axis to size."""
    unknown_loops: tuple[str, ...] = ()
    """Loops whose length only running tells: what is in them counts from 0 times to once, so that
    no upper figure is a bound."""

    def sent_bytes(self, axis: str | None = None) -> float:
        """Bytes that one device sends in one run; only over groups within `axis` if given.

        At most, unless there are `unknown_loops`, of which one turn counts. A collective over
        several axes counts in full for each of them.
        """
        return math.fsum(
            collective.times_high * collective.sent_bytes
            for collective in self.collectives
            if axis is None or axis in (collective.axes or ())
        )

    def count(self, kind: CollectiveKind) -> int:
        """Executions of collectives of `kind` in one run; at most, as `sent_bytes` is."""
        return sum(c.times_high for c in self.collectives if c.kind == kind)

    def to_json(self) -> JsonObject:
        """The records as plain dicts, lists, numbers and strings."""
        return dataclasses.asdict(self)
