"""The conversion of a collective instruction to a record (`jaxdist.hlo.records.Collective`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxdist.hlo.groups import MeshLayout, group_positions
from jaxdist.hlo.parse import Computation, Instruction, Module
from jaxdist.hlo.records import Collective, CollectiveKind
from jaxdist.hlo.schedule import collective_kind, is_fused_reduce_scatter, is_overlapped

SENT: dict[CollectiveKind, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
    "collective-broadcast": lambda n: float(n > 1),
}
"""The bytes that the busiest of n devices sends, as a multiple of the payload, with the usual
algorithm of each kind of collective."""


@dataclasses.dataclass(frozen=True)
class CallerContext:
    """The facts about a computation's caller on which the record of a collective depends."""

    is_fusion: bool = False
    start: tuple[Instruction, Computation] | None = None
    """The asynchronous start that runs the computation, and the computation that contains this
    start, or None if the computation is not asynchronous."""
    source: str = ""
    """The jax operation of the caller (`op_name`), or an empty string."""


def describe_collective(
    instruction: Instruction,
    computation: Computation,
    surroundings: CallerContext,
    module: Module,
    layout: MeshLayout,
) -> Collective:
    """Return the record of a single execution of a collective.

    Args:
      instruction: the instruction of the collective.
      computation: the computation that contains the collective.
      surroundings: the facts about the caller of the computation.
      module: the parsed HLO program.
      layout: the layout of the mesh that the program was compiled for.
    """
    kind = collective_kind(instruction)
    assert kind is not None, instruction.opcode
    if surroundings.is_fusion and is_fused_reduce_scatter(instruction, computation):
        kind = "reduce-scatter"
    groups = group_positions(instruction, kind, module)
    is_permute = kind == "collective-permute"
    axes = layout.pair_axes(groups) if is_permute else layout.group_axes(groups)
    size = layout.size(axes or ()) if is_permute else max(map(len, groups))
    operands = computation.operand_shapes(instruction)
    if instruction.opcode.startswith("ragged"):
        # Only the first operand is sent. The other operands are the buffer of the output, offsets
        # and sizes.
        operands = operands[:1]
    shapes = [shape for operand in operands for shape in operand]
    # Sizes come from the operands, since XLA:TPU may fuse a conversion of the result's dtype.
    parts = size if kind == "all-gather" else 1
    arrays = tuple(shape.bytes * parts for shape in shapes)
    payload = sum(arrays)
    moves = not is_permute or bool(axes)  # A permute from each device to itself sends nothing.
    is_async = surroundings.start is not None or instruction.opcode.endswith("-start")
    start, around = surroundings.start or (instruction, computation)
    return Collective(
        name=instruction.name,
        kind=kind,
        dtypes=tuple(shape.dtype for shape in shapes),
        payload_bytes=payload,
        axes=axes,
        group_size=size,
        groups=groups,
        times_low=1,
        times_high=1,
        sent_bytes=SENT[kind](size) * payload if moves else 0.0,
        is_async=is_async,
        overlapped=is_async and is_overlapped(start, around, module),
        source=instruction.source or surroundings.source,
        array_bytes=arrays,
    )
