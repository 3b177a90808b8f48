"""The memory and time of plans by their programs, compiled ahead of time for the topology."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
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
from jaxdist.runtime.topology import topology_devices

OF_ONE_SLICE = (
    "Several slices: one slice's program is compiled, with its part of the batch; a formula "
    "adds what crosses the slow network."
)


@dataclass(frozen=True)
class Confirmed:
    """The figures of a compiled program, for a single device.

    Attributes:
      seconds: time of a step, predicted from the compiler's estimates; with several slices the
        time of the slow network is added, by formula.
      peak_bytes: peak memory.
      mfu: model FLOPs utilization of a single slice, with all of attention's products counted.
      sent_bytes: bytes sent, by mesh axes.
      refusal: the reason why the compiler refuses the program, or an empty string where it accepts.
      note: a sentence on the parts that are not from the program.
      compile_seconds: time of the compilation.
      laid_out: whether the compiler was asked only for memory, so that `seconds` is the formula's.
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
    """Return the plan of a single slice, without the communication between slices."""
    return dataclasses.replace(plan, slices=1, scope="all")


def confirm(
    path: Path, overrides: Sequence[str], plan: Plan, target: Target, slow_seconds: float = 0.0
) -> Confirmed:
    """Compile a plan, which takes minutes on a core.

    Args:
      path: the configuration file, to which `overrides` are applied.
      plan: the plan to compile.
      target: the chips to compile for.
      slow_seconds: time of the slow network's traffic, by formula.
    """
    with _config(path, overrides, plan, target) as file:
        try:
            found = inspect_step(open_subject(file, (), topology_devices(target.text)))
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
    """Ask the compiler only for the memory of a plan, which takes seconds on a core.

    Args:
      path: the configuration file, to which `overrides` are applied.
      plan: the plan to compile.
      target: the chips to compile for.
      seconds: time of a step, by formula.
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

    In the compiler's messages, callers replace the yielded path by that of the original config.
    """
    values = planned(read(path, overrides).values, of_one_slice(plan))
    # Each slice has its part of the batch.
    values["train"]["batch_size"] //= target.slices
    with TemporaryDirectory() as directory:
        file = Path(directory) / path.name
        file.write_text(plain_yaml(values), encoding="utf-8")
        yield file
