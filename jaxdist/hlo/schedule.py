"""Collectives in a schedule: which instructions begin and end them, and what runs meanwhile.

A collective is asynchronous in one of four forms: `all-gather-start` and `all-gather-done`;
`async-start` and `async-done` around a computation that holds it; the same with an `async-update`
that hands over the operands, around a custom call that runs it (on the SparseCores of TPU7x); and
on TPU a fusion that holds it with the custom call `AsyncCollectiveStart`, compute fusions that hold
it again and continue it, and one with `AsyncCollectiveDone`. The ledger counts only the start.
"""

from __future__ import annotations

from jaxdist.hlo.parse import Computation, Instruction, Module
from jaxdist.hlo.records import CollectiveKind

KINDS: dict[str, CollectiveKind] = {
    "all-reduce": "all-reduce",
    "reduce-scatter": "reduce-scatter",
    "all-gather": "all-gather",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "collective-permute",
    "collective-broadcast": "collective-broadcast",
}
FUSED_START, FUSED_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
CALLED = "called_computations"
"""The attribute of a custom call that runs a computation, as on the SparseCores of a TPU."""

# Operations that keep no compute unit busy. Neither do scalar operations.
_IDLE = {
    "after-all",
    "bitcast",
    "constant",
    "copy",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "reshape",
    "tuple",
}


def collective_kind(instruction: Instruction) -> CollectiveKind | None:
    """Return the kind of collective that an instruction begins; None for all others."""
    return KINDS.get(instruction.opcode.removesuffix("-start"))


def collective_in(
    computation: Computation, module: Module
) -> tuple[Instruction, Computation] | None:
    """Return the first collective of a computation or its custom calls, with its computation."""
    for instruction in computation.instructions:
        if collective_kind(instruction) is not None:
            return instruction, computation
        if instruction.opcode == "custom-call" and (called := instruction.called(CALLED)):
            found = collective_in(module.computations[called[0]], module)
            if found is not None:
                return found
    return None


def is_fused_reduce_scatter(instruction: Instruction, computation: Computation) -> bool:
    """Return whether an all-reduce inside a fusion only serves to cut out this device's part.

    XLA:TPU writes `fusion(x), calls=%all-reduce-scatter`: an all-reduce and a dynamic-slice that
    run as one reduce-scatter.
    """
    if instruction.opcode != "all-reduce":
        return False
    users = list(computation.users.get(instruction.name, []))
    cuts = []
    while users:
        user = users.pop()
        if user.opcode in ("bitcast", "reshape", "copy", "get-tuple-element", "convert"):
            users += computation.users.get(user.name, [])
        else:
            cuts.append(user)
    return bool(cuts) and all(user.opcode == "dynamic-slice" for user in cuts)


def channels_in_flight(module: Module) -> frozenset[int]:
    """Return the channels of collectives that TPU fusions start and others continue."""
    return frozenset(
        channel
        for computation in module.computations.values()
        if FUSED_START in computation.custom_call_targets
        for instruction in computation.instructions
        if collective_kind(instruction)
        and (channel := instruction.number("channel_id")) is not None
    )


def is_overlapped(start: Instruction, computation: Computation, module: Module) -> bool:
    """Return whether compute is scheduled between an asynchronous start and its done.

    A start whose done is in the loop's next iteration overlaps with everything after it.
    """
    first = computation.positions[start.name] + 1
    end = done_of(start, computation, module)
    last = computation.positions[end] if isinstance(end, str) else None
    return any(_computes(one, module) for one in computation.instructions[first:last])


def done_of(
    start: Instruction, computation: Computation, module: Module, index: int | None = None
) -> str | int | None:
    """Find where `start` is waited for.

    Args:
      index: if `start` is a tuple (a loop's, or a computation's parameter), the element that is in
        flight.

    Returns:
      The name of the instruction that waits; otherwise the element of the computation's result that
      it becomes; otherwise None.
    """
    carriers = start.opcode in ("fusion", "parameter", "while")
    pending = [start]
    if index is not None:
        users = computation.users.get(start.name, [])
        pending = [user for user in users if user.number("index") == index]
    seen = {one.name for one in pending}
    place: int | None = None
    while pending:
        name = pending.pop().name
        for user in computation.users.get(name, []):
            if user.opcode.endswith("-done") or FUSED_DONE in targets_of(user, module):
                return user.name
            if user.is_root and user.opcode == "tuple":
                place = user.operands.index(name)
            follows = user.opcode in ("get-tuple-element", "async-update") or (
                user.opcode == "fusion" and carriers
            )
            if follows and user.name not in seen:
                seen.add(user.name)
                pending.append(user)
    return place


def launch_of(start: Instruction, computation: Computation) -> Instruction:
    """Return the instruction that launches an asynchronous start: itself, if it has operands.

    XLA writes work on the SparseCores of a TPU in this way: the start takes scratch memory, and an
    update hands over the operands when they are ready.
    """
    if start.opcode != "async-start" or start.operands:
        return start
    users = computation.users.get(start.name, [])
    return next((user for user in users if user.opcode == "async-update"), start)


def targets_of(instruction: Instruction, module: Module) -> frozenset[str]:
    """Return the targets of the custom calls inside a fusion; empty for other instructions."""
    if instruction.opcode != "fusion":
        return frozenset()
    return module.computations[instruction.called("calls")[0]].custom_call_targets


def _computes(instruction: Instruction, module: Module) -> bool:
    if instruction.opcode in ("while", "conditional", "call"):
        return True
    if instruction.opcode == "custom-call":
        return instruction.shapes != () and "AllocateBuffer" not in instruction.attributes
    moves = instruction.opcode.endswith(("-start", "-done", "-update"))
    if instruction.opcode in _IDLE or moves or collective_kind(instruction):
        return False
    if {FUSED_START, FUSED_DONE} & targets_of(instruction, module):
        return False
    return any(shape.dims for shape in instruction.shapes)
