"""A plan compiled ahead of time for its topology: what its own program says of memory and time."""

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
    "Several slices: one slice's program is compiled, with its part of the batch; what crosses "
    "the slow network is added by formula."
)


@dataclass(frozen=True)
class Confirmed:
    """What a compiled program says; of one device.

    Attributes:
      seconds: of a step, predicted from the compiler's estimates; of several slices with the slow
        network's, by formula.
      peak_bytes: of memory.
      mfu: with attention counted whole, of one slice.
      sent_bytes: by mesh axes.
      refusal: why the compiler does not take it; empty where it does.
      note: what is not of the program.
      compile_seconds: that it took.
      laid_out: whether the compiler was asked for memory alone: `seconds` are the formula's then.
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
    """The program that each of several slices runs, without what joins them."""
    return dataclasses.replace(plan, slices=1, scope="all")


def confirm(
    path: Path, overrides: Sequence[str], plan: Plan, target: Target, slow_seconds: float = 0.0
) -> Confirmed:
    """Compile one plan; minutes of a core.

    Args:
      slow_seconds: of what crosses the slow network, by formula.
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
    """Ask the compiler for the memory of one plan; seconds of a core, in a process of its own.

    Args:
      seconds: of a step, by formula.
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
    """A file of a config with a plan of one slice in it, for as long as it is needed.

    Nothing but the plan is of this file: its name stands in messages in place of the config's.
    """
    values = planned(read(path, overrides).values, of_one_slice(plan))
    values["train"]["batch_size"] //= target.slices
    with TemporaryDirectory() as directory:
        file = Path(directory) / path.name
        file.write_text(plain_yaml(values), encoding="utf-8")
        yield file
