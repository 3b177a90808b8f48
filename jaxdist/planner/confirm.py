"""The memory and time of plans, as found by a compilation of their programs for the topology.

The compilation needs no TPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from jaxdist.config import plain_yaml, read
from jaxdist.errors import RunError
from jaxdist.inspect.program import inspect_step, open_subject
from jaxdist.inspect.rows import by_axes
from jaxdist.planner.laid_out import laid_out_bytes
from jaxdist.planner.plan import Plan
from jaxdist.planner.target import Target
from jaxdist.planner.write import planned

OF_ONE_SLICE = (
    "With several slices, the program of one slice is compiled for the slice's part of the batch, "
    "and a formula adds the communication over the slow network."
)

QUICK: Mapping[str, bool | int] = {
    "xla_jf_critical_path_scheduler": False,
    "xla_jf_xlu_optimizer": False,
    "xla_jf_avoid_cross_slot_vmem_bank_conflicts": False,
    "xla_jf_load_cse_and_s2l_forwarding": False,
    "xla_jf_debug_level": 0,
    "xla_tpu_check_llo_types": False,
}
"""Options of libtpu without which a compilation takes longer, but which change no number of a plan.

libtpu spends most of a compilation on the instructions within each operation. It estimates the time
of the operation before that, and assigns memory even earlier. These options leave out optimizations
and checks of the instructions."""


@dataclass(frozen=True)
class Confirmed:
    """The numbers of a compiled program, for a single device.

    Attributes:
      seconds: the time of a step, predicted from the compiler's estimates. With several slices, the
        time includes the time of the slow network by formula.
      peak_bytes: the peak memory.
      mfu: the model FLOPs utilization of a single slice. All of attention's products are counted.
      sent_bytes: the bytes that the device sends, by mesh axes.
      refusal: the reason why the compiler refuses the program, or an empty string if it accepts the
        program.
      note: a sentence on the numbers that are not from the program, or an empty string.
      compile_seconds: the time of the compilation, in seconds.
      laid_out: whether the compiler was asked only for memory. In that case, `seconds` is from the
        formula, and `mfu`, `sent_bytes` and `compile_seconds` are missing.
    """

    seconds: float = 0.0
    peak_bytes: int = 0
    mfu: float = 0.0
    sent_bytes: dict[str, float] = dataclasses.field(default_factory=dict)
    refusal: str = ""
    note: str = ""
    compile_seconds: float = 0.0
    laid_out: bool = False


def of_one_slice(plan: Plan) -> Plan:
    """Return the plan for one of its slices, without the communication between slices."""
    return dataclasses.replace(plan, slices=1, scope="all")


def confirm(
    path: Path, overrides: Sequence[str], plan: Plan, target: Target, slow_seconds: float = 0.0
) -> Confirmed:
    """Compile the program of a plan, and return the numbers of the program.

    The compilation takes minutes on a core. If the compiler refuses the program, the result has
    only the reason.

    Args:
      path: the configuration file, to which `overrides` are applied.
      plan: the plan to compile.
      target: the chips to compile for.
      slow_seconds: the time of the slow network's traffic by formula, in seconds.
    """
    with _config(path, overrides, plan, target) as file:
        try:
            subject = open_subject(file, (), target.text)
            found = inspect_step(subject, QUICK)
        except RunError as error:
            return Confirmed(refusal=str(error).replace(str(file), str(path)))
    assert found.step_time is not None, "TPU programs are timed"
    rows = by_axes(found.ledger, found.gradient_axes)
    sent = {" x ".join(row.axes or ("other groups",)): float(row.sent_bytes) for row in rows}
    return Confirmed(
        seconds=found.step_time.seconds + slow_seconds,
        peak_bytes=found.ledger.memory.peak_bytes,
        mfu=found.mfu(masked=True) or 0.0,
        sent_bytes=sent,
        note=OF_ONE_SLICE if target.slices > 1 else "",
        compile_seconds=found.compile_seconds,
    )


def lay_out(
    path: Path, overrides: Sequence[str], plan: Plan, target: Target, seconds: float = 0.0
) -> Confirmed:
    """Return a plan's memory from the compiler, together with the time by formula.

    The compiler takes only seconds, since it stops before it generates code. If the compiler
    refuses the program, the result has only the reason.

    Args:
      path: the configuration file, to which `overrides` are applied.
      plan: the plan to compile.
      target: the chips to compile for.
      seconds: the time of a step by formula, which becomes part of the result.
    """
    limit = target.device.memory_bytes
    assert limit is not None, "targets have memory of their own"
    with _config(path, overrides, plan, target) as file:
        try:
            size = laid_out_bytes(file, (), target.text, limit)
        except RunError as error:
            return Confirmed(refusal=str(error).replace(str(file), str(path)), laid_out=True)
    note = OF_ONE_SLICE if target.slices > 1 else ""
    return Confirmed(seconds=seconds, peak_bytes=size, note=note, laid_out=True)


@contextmanager
def _config(path: Path, overrides: Sequence[str], plan: Plan, target: Target) -> Iterator[Path]:
    """Write a config with the plan for a single slice to a temporary file, and yield its path.

    Callers replace the yielded path in the compiler's messages with the original path.
    """
    values = planned(read(path, overrides).values, of_one_slice(plan))
    # A single slice computes only its part of the batch.
    values["train"]["batch_size"] //= target.slices
    with TemporaryDirectory() as directory:
        file = Path(directory) / path.name
        file.write_text(plain_yaml(values), encoding="utf-8")
        yield file
