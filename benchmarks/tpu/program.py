"""The predicted time and memory of a step that is compiled for a pod, in a separate process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.core import child
from benchmarks.tpu.cases import Case
from jaxdist.errors import RunError
from jaxdist.inspect.program import inspect_step, open_subject
from jaxdist.inspect.times import dearest, parts_of
from jaxdist.runtime.topology import topology_devices

CONFIG = Path(__file__).with_name("llama.yaml")


@dataclass(frozen=True)
class Step:
    """A predicted step; bytes and seconds are of one device.

    Attributes:
      fits: whether the compiler accepts the program.
      refusal: the compiler's reason to refuse, in which case all numbers are 0.
      model, mesh: the model and the mesh, as text.
      seconds: the predicted seconds of a step.
      mfu, mfu_causal: the MFU that counts all of attention, and the MFU that counts half.
      peak_bytes: the peak memory.
      parts: the seconds of each kind of work or waiting.
      overlapped_seconds: the seconds of collectives that run during compute, by axes.
      dearest: the operations that take the most time, with their seconds.
      estimate_seconds: the time that the prediction itself took.
      compile_seconds: the time that the compiler took.
    """

    fits: bool
    refusal: str
    model: str = ""
    mesh: str = ""
    seconds: float = 0.0
    mfu: float = 0.0
    mfu_causal: float = 0.0
    peak_bytes: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    overlapped_seconds: Mapping[str, float] = field(default_factory=dict)
    dearest: Sequence[tuple[str, float]] = ()
    estimate_seconds: float = 0.0
    compile_seconds: float = 0.0


def measure(case: Case) -> Step:
    """Compile a case in a new process, and predict its step."""
    compile_one = child.apart(predicted, f"compiling {case.name} for {case.topology}")
    return compile_one(case.topology, case.settings)[0]


def predicted(topology: str, settings: Sequence[str]) -> list[Step]:
    """Compile the step of `llama.yaml` with these overrides for a topology, and predict it."""
    try:
        found = inspect_step(open_subject(CONFIG, settings, topology_devices(topology)))
    except RunError as error:
        return [Step(fits=False, refusal=str(error))]
    time = found.step_time
    assert time is not None, "the compiler of TPUs writes estimates"
    mesh = " x ".join(f"{axis} {size}" for axis, size in found.ledger.axes.items() if size > 1)
    step = Step(
        fits=True,
        refusal="",
        model=found.model,
        mesh=mesh,
        seconds=time.seconds,
        mfu=found.mfu(masked=True) or 0.0,
        mfu_causal=found.mfu(masked=False) or 0.0,
        peak_bytes=found.ledger.memory.peak_bytes,
        parts=parts_of(time),
        overlapped_seconds=time.overlapped_seconds,
        dearest=[(source.name, source.seconds) for source in dearest(time)],
        estimate_seconds=found.estimate_seconds,
        compile_seconds=found.compile_seconds,
    )
    return [step]
