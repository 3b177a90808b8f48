"""The conversion of collective instructions to records (`jaxdist.hlo.records.Collective`)."""

from __future__ import annotations

from collections.abc import Callable

from jaxdist.hlo.groups import MeshLayout, group_positions
from jaxdist.hlo.parse import Computation, Instruction, Module
from jaxdist.hlo.records import Collective, CollectiveKind
from jaxdist.hlo.schedule import (
    FUSED_DONE,
    FUSED_START,
    channels_in_flight,
    collective_kind,
    is_fused_reduce_scatter,
    is_overlapped,
    launch_of,
    targets_of,
)

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


class Collectives:
    """The records of the collectives that begin at the instructions of a program.

    Args:
      module: the parsed HLO program.
      layout: the layout of the mesh that the program was compiled for.
    """

    def __init__(self, module: Module, layout: MeshLayout) -> None:
        self._module, self._layout = module, layout
        self._in_flight = channels_in_flight(module)
        # The records are cached, since a computation may be read many times.
        self._known: dict[Instruction, tuple[Collective, ...]] = {}

    def begun(self, caller: Instruction, around: Computation) -> tuple[Collective, ...]:
        """Return a record for a single execution of each collective that an instruction begins.

        Args:
          caller: the instruction, which is a collective, or contains collectives.
          around: the computation that contains the instruction.
        """
        if caller not in self._known:
            self._known[caller] = tuple(
                self._described(one, inside, caller, around)
                for one, inside in self._module.parts(caller, around)
                if collective_kind(one) is not None and self._begins(one, inside, caller)
            )
        return self._known[caller]

    def _begins(self, one: Instruction, inside: Computation, caller: Instruction) -> bool:
        """Return whether a collective begins at an instruction that contains the collective.

        The result is false for a TPU fusion that continues or ends a collective, which an earlier
        instruction began.
        """
        targets = inside.custom_call_targets
        if not caller.opcode.startswith("fusion") or FUSED_START in targets:
            return True
        return FUSED_DONE not in targets and one.number("channel_id") not in self._in_flight

    def _described(
        self,
        instruction: Instruction,
        computation: Computation,
        caller: Instruction,
        around: Computation,
    ) -> Collective:
        """Return the record of a collective.

        Args:
          instruction: the instruction of the collective.
          computation: the computation that contains the collective.
          caller, around: the arguments of `begun`.
        """
        kind = collective_kind(instruction)
        assert kind is not None, instruction.opcode
        if caller.opcode.startswith("fusion") and is_fused_reduce_scatter(instruction, computation):
            kind = "reduce-scatter"
        groups, layout = group_positions(instruction, kind, self._module), self._layout
        is_permute = kind == "collective-permute"
        axes = layout.pair_axes(groups) if is_permute else layout.group_axes(groups)
        size = layout.size(axes or ()) if is_permute else max(map(len, groups))
        operands = computation.operand_shapes(instruction)
        if instruction.opcode.startswith("ragged"):
            # Only the first operand is sent. The other operands are the buffer of the output,
            # offsets and sizes.
            operands = operands[:1]
        shapes = [shape for operand in operands for shape in operand]
        # Sizes come from the operands, since XLA:TPU may fuse a conversion of the result's dtype.
        parts = size if kind == "all-gather" else 1
        arrays = tuple(shape.bytes * parts for shape in shapes)
        payload = sum(arrays)
        moves = not is_permute or bool(axes)  # A permute from each device to itself sends nothing.
        starts = FUSED_START in targets_of(caller, self._module)
        is_async = starts or caller.opcode.endswith("-start")
        start = launch_of(caller, around)
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
            overlapped=is_async and is_overlapped(start, around, self._module),
            source=instruction.source or caller.source,
            array_bytes=arrays,
        )
