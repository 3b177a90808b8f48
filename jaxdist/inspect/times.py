"""The output of a step's predicted time, as tables, JSON values and a picture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxdist.columns import table
from jaxdist.cost.step_time import StepTime
from jaxdist.hlo.entries import Entry
from jaxdist.inspect.program import Inspection
from jaxdist.metrics.figure import new_figure, save_figure
from jaxdist.types import JsonObject

DEAREST = 10
"""The number of rows in the table of the most expensive operations."""
# These parts of an `op_name` are names of jax's transformations, and not scopes of the user.
_WRAPPERS = re.compile(
    r"jit\([^)]*\)|while|body|checkpoint|closed_call|shard_map|pjit|cond|branch(?:_\d+_fun)?"
)
NO_PREDICTION = "No time is predicted for {kind}: only the compiler for TPUs estimates times."


@dataclass(frozen=True)
class OperationEntry:
    """The cost of all instructions of a jax operation.

    Attributes:
      name: the operation with its enclosing scopes, such as `backward/attention/dot_general`.
      times: the number of executions of the instructions.
      seconds: the seconds of the step that the instructions take.
      assumed: whether a rate is assumed for any of the instructions.
    """

    name: str
    times: float
    seconds: float
    assumed: bool


def show_seconds(seconds: float) -> str:
    """Return seconds as text with three digits, in seconds, milliseconds or microseconds.

    >>> show_seconds(23.0771), show_seconds(0.0123), show_seconds(2e-6)
    ('23.1 s', '12.3 ms', '2 us')
    """
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def source_name(entry: Entry) -> str:
    """Return a short name of the jax operation to which an instruction belongs.

    If XLA added the instruction, the name consists of `Entry.what` and "from XLA".

    >>> op = "jit(train)/transpose(jvp(attention))/while/body/checkpoint/dot_general"
    >>> source_name(Entry("f.1", op, "compiler", (), "fusion", 1, 0.0, 0.0))
    'backward/attention/dot_general'
    """
    if not entry.source:
        return f"{entry.what}, from XLA"
    parts = []
    for part in entry.source.split("/"):
        direction = "backward" if "transpose(" in part else ""
        if part == "rematted_computation":
            direction, part = "recomputed", ""
        inner = re.sub(r"^(?:(?:jvp|transpose|vmap|remat)\()+|\)+$", "", part)
        if direction and direction not in parts:
            parts.append(direction)
        if inner and not _WRAPPERS.fullmatch(part):
            parts.append(inner)
    return "/".join(parts) or entry.what


def dearest(found: StepTime) -> list[OperationEntry]:
    """Return the `DEAREST` operations that take the most time, the most expensive first.

    The collectives, kernels and copies of an operation have separate entries.
    """
    grouped: dict[str, OperationEntry] = {}
    for entry in found.entries:
        name = source_name(entry)
        if entry.basis == "links":
            name = f"{entry.what}: {name}"
        elif entry.basis == "schedule":
            name = entry.what
        elif entry.basis == "assumed":
            name = f"kernel: {name}"
        elif entry.what.startswith("copy"):
            # XLA names a copy into another layout after the operation that uses or makes the array.
            name = f"copy: {name}"
        old = grouped.get(name, OperationEntry(name, 0, 0.0, assumed=False))
        grouped[name] = OperationEntry(
            name,
            old.times + entry.times,
            old.seconds + entry.waited_seconds,
            old.assumed or entry.basis == "assumed",
        )
    return sorted(grouped.values(), key=lambda source: -source.seconds)[:DEAREST]


def parts_of(found: StepTime) -> dict[str, float]:
    """Return the seconds of each kind of work and wait, which add up to the step's time.

    Kinds that take no time are left out.
    """
    parts = {
        "compute": found.compute_seconds - found.assumed_seconds,
        "compute at an assumed rate": found.assumed_seconds,
        "waits for copies": found.copy_seconds,
    }
    parts |= {f"waits for {axes}": s for axes, s in found.exposed_seconds.items()}
    parts["bubble of the pipeline"] = found.bubble_seconds
    return {name: seconds for name, seconds in parts.items() if seconds}


def seconds_table(title: str, parts: Mapping[str, float], total: float) -> Table:
    """Return a table of the parts of a step's time, with their shares of the total."""
    made = table(title, "", "seconds", "share")
    for name, seconds in parts.items():
        if seconds:
            made.add_row(name, show_seconds(seconds), f"{seconds / total:.1%}")
    made.add_row("step", show_seconds(total), "100%")
    return made


def print_times(inspection: Inspection, console: Console) -> None:
    """Print the parts of the predicted step, and its `DEAREST` most expensive operations.

    If no time is predicted, only a sentence is printed.
    """
    console.print()
    found = inspection.step_time
    if found is None:
        kind = inspection.device_kind
        console.print(NO_PREDICTION.format(kind=kind), style="dim", soft_wrap=True)
        return
    console.print(seconds_table("Predicted step of each device", parts_of(found), found.seconds))
    for line in _notes(inspection, found):
        console.print(line, style="dim", soft_wrap=True)
    console.print()
    sources = table(
        "The operations that take the most time", "operation", "times", "seconds", "share"
    )
    for source in dearest(found):
        mark = " *" if source.assumed else ""
        share = f"{source.seconds / found.seconds:.1%}"
        sources.add_row(
            source.name[-48:] + mark, f"{source.times:,.0f}", show_seconds(source.seconds), share
        )
    console.print(sources)
    if found.assumed_seconds:
        console.print(
            "* The compiler gives no estimate for this operation, so a rate is assumed.",
            style="dim",
        )


def _notes(inspection: Inspection, found: StepTime) -> list[str]:
    whole, causal = inspection.mfu(masked=True), inspection.mfu(masked=False)
    assert whole is not None
    assert causal is not None
    rate = inspection.tokens / found.seconds / inspection.ledger.devices
    notes = [
        f"MFU {causal:.1%} (causal attention counts half), {whole:.1%} (attention counts whole); "
        f"{rate:,.0f} {inspection.step.split()[-1]} a second and chip."
    ]
    beside = {axes: s for axes, s in found.overlapped_seconds.items() if s}
    if beside:
        said = ", ".join(f"{show_seconds(s)} over {axes}" for axes, s in beside.items())
        notes.append(f"Beside compute: {said}.")
    notes += _schedule_notes(found)
    if found.unknown_loops:
        notes.append(
            "THE STEP TAKES LONGER: the number of iterations of these loops is unknown, so each "
            f"is counted as a single iteration: {', '.join(found.unknown_loops)}."
        )
    assumptions = sorted({e.what for e in found.entries if e.basis == "assumed"})
    notes += [f"Assumed: {what}." for what in assumptions[:4]]
    if len(assumptions) > 4:
        notes.append(
            f"There are {len(assumptions) - 4} more assumptions; --json lists all of them."
        )
    return notes


def _schedule_notes(found: StepTime) -> list[str]:
    """Return sentences about the branches that the prediction assumes for conditionals."""
    notes: list[str] = []
    if found.schedule:
        notes.append(
            f"Each tick takes the branches of the schedule ({found.schedule}). The bubble is the "
            "time for which the average stage waits for the slowest stage, summed over ticks; all "
            "other rows are averages over the stages."
        )
    if found.unmatched:
        notes.append(
            f"NOT THE TIME OF THE PIPELINE'S STEP: {found.unmatched}, so the schedule cannot be "
            "followed, and each tick is counted with its most expensive branches."
        )
    if found.seconds_low < found.seconds:
        notes.append(
            f"With the cheapest branches, the step takes {show_seconds(found.seconds_low)}."
        )
    return notes


def times_json(inspection: Inspection) -> JsonObject | None:
    """Return the predicted time as JSON values, or None if no time is predicted."""
    found = inspection.step_time
    if found is None:
        return None
    return {
        **found.to_json(),
        "parts": parts_of(found),
        "mfu": inspection.mfu(masked=True),
        "mfu_causal": inspection.mfu(masked=False),
        "per_second_and_device": inspection.tokens / found.seconds / inspection.ledger.devices,
        "dearest": [asdict(one) for one in dearest(found)],
    }


def draw_times(inspection: Inspection, directory: Path) -> Path:
    """Draw the parts of the predicted step as a stacked bar, and return the path of the file.

    The file in the directory is `step_time.svg`. The inspection must have a predicted time.
    """
    found = inspection.step_time
    assert found is not None, "there is a prediction"
    figure = new_figure((7.5, 2.2))
    axes = figure.add_subplot()
    left = 0.0
    for name, seconds in parts_of(found).items():
        axes.barh([0], [seconds], left=left, label=f"{name}: {show_seconds(seconds)}")
        left += seconds
    axes.set_yticks([])
    axes.set_xlabel("seconds of a step")
    axes.set_title(f"{inspection.model}: {show_seconds(found.seconds)}", fontsize=10)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8
    )
    return save_figure(figure, directory, "step_time", formats=("svg",), what="the step's time")[0]
