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
    """The record of a collective instruction, with bytes per device and execution."""

    name: str
    """The instruction's name in the program."""
    kind: CollectiveKind
    """The kind of collective; TPU's fused reduce-scatter counts as a reduce-scatter."""
    dtypes: tuple[str, ...]
    """The dtype of each operand that is sent, in HLO's spelling (`f32`, `bf16`, `s8`)."""
    payload_bytes: int
    """The bytes of the full tensors: of the results for an all-gather, and of the operands for
    other kinds."""
    axes: tuple[str, ...] | None
    """The mesh axes that the groups span, in mesh order, or None if the groups are not a product of
    axes."""
    group_size: int
    """The number of devices in a group. For a permute, this number is the product of the sizes of
    `axes`."""
    groups: tuple[tuple[int, ...], ...]
    """The groups as positions in the program's device assignment. For a permute, the groups are
    pairs of a source and a target."""
    times_low: int
    """The least number of executions per run of the program."""
    times_high: int
    """The largest number of executions per run, if `bounded` is true. For a collective in a
    conditional, this number is larger than `times_low`."""
    sent_bytes: float
    """The bytes that the busiest device sends in one execution of the collective, if the collective
    runs by the usual algorithm of its kind."""
    is_async: bool
    """Whether the collective is asynchronous, a pair of a start and a done."""
    overlapped: bool
    """Whether compute is scheduled between the collective's start and its done."""
    source: str
    """The jax operation of the collective (`op_name`), or an empty string without metadata."""
    bounded: bool = True
    """Whether `times_high` is a bound. The value is False inside a loop of unknown length, for
    which `times_high` counts a single iteration."""
    array_bytes: tuple[int, ...] = ()
    """The bytes of each combined operand, which add up to `payload_bytes`."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """The bytes that a program needs on a device, from XLA's buffer assignment."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """The part of the outputs that is stored in donated arguments."""
    temp_bytes: int
    code_bytes: int
    peak_bytes: int
    """The required memory: arguments, outputs that do not reuse arguments, and temporaries. On TPU
    this number includes memory that no other field counts."""
    host_bytes: int = 0
    """The bytes in the host's memory, which no other field includes. On a CPU, whose device memory
    is the host's, this is 0."""


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The communication, computation and memory of a run of a compiled program on each device."""

    collectives: tuple[Collective, ...]
    flops_low: float
    """The FLOPs of a device in dots and convolutions, which are 2 for each multiply-add. All
    iterations of loops are counted, and the cheapest branch of each conditional."""
    flops_high: float
    """The FLOPs of a device with the most expensive branch of each conditional."""
    memory: Memory
    devices: int
    """The number of devices of the program."""
    axes: dict[str, int]
    """The size of each mesh axis."""
    unknown_loops: tuple[str, ...] = ()
    """The names of the loops whose number of iterations is unknown before a run. Each of them
    counts as 0 to 1 iterations, so the larger figures are not upper bounds.
    """

    def sent_bytes(self, axis: str | None = None) -> float:
        """Return the bytes that a device sends in a run.

        The sum is an upper bound, but each loop in `unknown_loops` counts as a single iteration.

        Args:
          axis: the mesh axis of the collectives to count, or None to count all collectives. A
            collective over several axes counts in full for each of its axes.
        """
        return math.fsum(
            collective.times_high * collective.sent_bytes
            for collective in self.collectives
            if axis is None or axis in (collective.axes or ())
        )

    def count(self, kind: CollectiveKind) -> int:
        """Return the number of executions of a kind of collective in a run.

        The number is an upper bound only if `unknown_loops` is empty.
        """
        return sum(c.times_high for c in self.collectives if c.kind == kind)

    def to_json(self) -> JsonObject:
        """Return the ledger as plain dicts, lists, numbers and strings."""
        return dataclasses.asdict(self)
