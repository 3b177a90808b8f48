"""Functions that find the instructions at which a collective begins and ends in a schedule.

An asynchronous collective has one of four forms:

- `all-gather-start` and `all-gather-done`, and likewise for the other kinds;
- `async-start` and `async-done`, around a computation that contains the collective;
- `async-start` without operands, an `async-update` that passes the operands, and `async-done`,
  around a custom call that runs the collective (on the SparseCores of TPU7x);
- on TPU, a fusion that contains the collective and the custom call `AsyncCollectiveStart`, compute
  fusions that contain the collective again and continue it, and a fusion with the custom call
  `AsyncCollectiveDone`.

The ledger counts only the start, so that each execution is counted once.
"""

from __future__ import annotations

from jaxdist.hlo.estimates import IDLE_TARGETS, NO_TIME
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
"""The kind of collective of each HLO operation."""
FUSED_START, FUSED_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
"""The custom calls in the fusions that start and end a collective on TPU."""

# Operations that keep no compute unit busy. `_computes` recognizes operations on scalars by shape.
_IDLE = NO_TIME | {"copy", "reshape"}


def collective_kind(instruction: Instruction) -> CollectiveKind | None:
    """Return the kind of collective that an instruction begins, or None for other instructions."""
    return KINDS.get(instruction.opcode.removesuffix("-start"))


def is_fused_reduce_scatter(instruction: Instruction, computation: Computation) -> bool:
    """Return whether an all-reduce inside a fusion runs as a reduce-scatter.

    XLA:TPU writes a reduce-scatter as `fusion(x), calls=%all-reduce-scatter`. The fusion contains
    an all-reduce, and uses only a dynamic-slice of the result.
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
    """Return the channel numbers of the collectives that start in a TPU fusion."""
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

    If the done instruction is in the loop's next iteration, only instructions after the start
    instruction are considered.
    """
    first = computation.positions[start.name] + 1
    end = done_of(start, computation, module)
    last = computation.positions[end] if isinstance(end, str) else None
    return any(_computes(one, module) for one in computation.instructions[first:last])


def done_of(
    start: Instruction, computation: Computation, module: Module, index: int | None = None
) -> str | int | None:
    """Find the instruction that waits for an asynchronous operation.

    Args:
      start: the instruction that starts the operation, or an instruction whose result is a tuple
        that contains the operation in flight.
      computation: the computation that contains `start`.
      module: the parsed HLO program.
      index: the index of the operation in flight in the tuple of `start`, which is a loop or a
        parameter. For an instruction that starts the operation the index is None.

    Returns:
      The name of the instruction that waits. If the computation returns the operation in flight,
      the result is the index of the operation in the returned tuple. If no instruction waits and
      the operation is not returned, the result is None.
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
    """Return the instruction at which an asynchronous operation starts to run.

    An operation whose start has operands runs at once. For work on SparseCores, XLA writes a start
    without operands, which only reserves scratch memory. A later instruction `async-update` passes
    the operands when they are ready. The result is then this `async-update`.
    """
    if start.opcode != "async-start" or start.operands:
        return start
    users = computation.users.get(start.name, [])
    return next((user for user in users if user.opcode == "async-update"), start)


def targets_of(instruction: Instruction, module: Module) -> frozenset[str]:
    """Return the targets of the custom calls inside a fusion.

    The set is empty for other instructions.
    """
    if instruction.opcode != "fusion":
        return frozenset()
    return module.computations[instruction.called("calls")[0]].custom_call_targets


def _computes(instruction: Instruction, module: Module) -> bool:
    """Return whether an instruction keeps a compute unit busy."""
    if instruction.opcode in ("while", "conditional", "call"):
        return True
    if instruction.opcode == "custom-call":
        return instruction.shapes != () and instruction.custom_call_target not in IDLE_TARGETS
    moves = instruction.opcode.endswith(("-start", "-done", "-update"))
    if instruction.opcode in _IDLE or moves or collective_kind(instruction):
        return False
    if {FUSED_START, FUSED_DONE} & targets_of(instruction, module):
        return False
    return any(shape.dims for shape in instruction.shapes)
