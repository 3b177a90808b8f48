"""The compiler's time estimates in a TPU program, and the work of instructions without estimates.

XLA:TPU writes `estimated_cycles` into the backend config of fusions, copies, converts and
reductions. The number is in cycles of the TensorCore's clock for an execution, over all cores of
the device. XLA writes 2^63 - 1 for an unknown estimate, and no estimate for collectives and custom
calls. The work of a kernel is the FLOPs and bytes that the kernel states (the `cost_estimate` of a
Pallas call), or else the bytes of its operands and results.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from jaxdist.hlo.flops import instruction_flops
from jaxdist.hlo.parse import ArrayShape, Computation, Instruction, Module

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN = 2**62  # XLA writes 2^63 - 1 for an unknown estimate. Known estimates are smaller.
_STATED_BYTES = re.compile(r'"bytes_accessed":"?(\d+)')
_BLOCKS = re.compile(r'\\"(block_\w+)\\": (\d+)')
_HOST = "S(5)"

NO_TIME = frozenset({
    "add-dependency", "after-all", "bitcast", "constant", "domain", "get-dimension-size",
    "get-tuple-element", "iota", "opt-barrier", "parameter", "partition-id", "replica-id", "tuple",
})  # fmt: skip
"""The operations that only name values, or that are computed inside another operation."""

IDLE_TARGETS = frozenset({
    "AllocateBuffer", "AssumeGatherIndicesInBound", "AsyncCollectiveDone", "AsyncCollectiveStart",
    "ConcatBitcast", "SliceBitcast", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape",
    "annotate_device_placement", "xla.sdy.FuncResultSharding",
})  # fmt: skip
"""The targets of custom calls that execute nothing, but only name or reserve memory."""


@dataclasses.dataclass(frozen=True)
class Effort:
    """The work of an instruction without an estimate, whose time depends on an assumed rate."""

    what: str
    """The custom call's target and kernel name, or the operation."""
    flops: float
    bytes: int
    kernel: str = ""
    """The name of the kernel, or an empty string for other instructions."""
    operands: tuple[ArrayShape, ...] = ()
    results: tuple[ArrayShape, ...] = ()
    blocks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The block sizes in the kernel's metadata (`block_q`, `block_kv`, ...), if there are any."""


def estimated_cycles(instruction: Instruction) -> int | None:
    """Return the compiler's estimate of the cycles of one execution, or None without an estimate.

    >>> from jaxdist.hlo.parse import parse_instruction
    >>> line = '  %a = f32[] add(%b, %b), backend_config={"estimated_cycles":"288"}'
    >>> estimated_cycles(parse_instruction(line))
    288
    """
    found = _CYCLES.search(instruction.attributes)
    cycles = int(found[1]) if found else _UNKNOWN
    return cycles if cycles < _UNKNOWN else None


def takes_no_time(instruction: Instruction) -> bool:
    """Return whether an instruction without an estimate takes no time on the device.

    Scalars are computed on another unit, concurrently with the device's work.
    """
    if instruction.opcode in NO_TIME or instruction.custom_call_target in IDLE_TARGETS:
        return True
    return not any(shape.dims for shape in instruction.shapes)


def effort(instruction: Instruction, computation: Computation, module: Module) -> Effort:
    """Return the FLOPs and bytes of an instruction that has no estimate."""
    shapes = [s for operand in computation.operand_shapes(instruction) for s in operand]
    moved_bytes = sum(shape.bytes for shape in _touched(instruction, shapes))
    attributes = instruction.attributes
    stated = _STATED_BYTES.search(attributes)
    return Effort(
        what=" ".join(filter(None, (instruction.custom_call_target, kernel_name(instruction))))
        or instruction.opcode,
        flops=float(
            sum(instruction_flops(*part) for part in module.parts(instruction, computation))
        ),
        bytes=int(stated[1]) if stated else moved_bytes,
        kernel=kernel_name(instruction),
        operands=tuple(shapes),
        results=instruction.shapes,
        blocks={name: int(size) for name, size in _BLOCKS.findall(attributes)},
    )


def _touched(instruction: Instruction, shapes: list[ArrayShape]) -> list[ArrayShape]:
    """Return the shapes of the arrays that an instruction reads and writes."""
    # A slice, or an update in place, reads and writes only a part of the array.
    if instruction.opcode == "dynamic-update-slice":
        return [shapes[1]] * 2
    if instruction.opcode in ("dynamic-slice", "slice"):
        return [*instruction.shapes] * 2
    return [*shapes, *instruction.shapes]


def kernel_name(instruction: Instruction) -> str:
    """Return the name of the Pallas kernel that an instruction calls.

    The name is empty for other instructions.
    """
    if instruction.custom_call_target != "tpu_custom_call":
        return ""
    # XLA appends numbers to names that would not be unique.
    return re.sub(r"[.\d]+$", "", instruction.name)


def is_on_host(instruction: Instruction) -> bool:
    """Return whether a result of the instruction is in host memory (memory space 5 on TPU)."""
    return _HOST in instruction.type_text
