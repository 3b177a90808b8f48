"""The differences between two compiled train steps, in their numbers and in their programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console

from jaxdist.columns import table
from jaxdist.cost.step_time import StepTime
from jaxdist.inspect.program import Inspection
from jaxdist.inspect.rows import by_kind, show_bytes, show_number
from jaxdist.mesh import describe_mesh
from jaxdist.types import JsonObject

DiffVerdict = Literal["same program", "same numbers", "different"]
"""The result of a comparison of two steps. With "same numbers", the collectives, bytes, FLOPs and
memory are equal, but the programs differ."""
Value = float | str | None


@dataclass(frozen=True)
class LedgerChange:
    """A number that differs between two inspections.

    Attributes:
      of: the group of the number, such as "FLOPs", "memory", or mesh axes with a kind of
        collective.
      what: the number's name with its unit, such as "sent_bytes".
      before, after: the two values, or None if the program does not have the number.
    """

    of: str
    what: str
    before: Value
    after: Value


@dataclass(frozen=True)
class Difference:
    """All changes from one inspection to another.

    Attributes:
      before, after: the inspections.
      changes: the numbers that differ.
    """

    before: Inspection
    after: Inspection
    changes: tuple[LedgerChange, ...]

    @property
    def verdict(self) -> DiffVerdict:
        """The result of the comparison: equal programs, equal numbers, or different numbers."""
        if self.changes:
            return "different"
        same = self.before.program_sha256 == self.after.program_sha256
        return "same program" if same else "same numbers"

    def to_json(self) -> JsonObject:
        """Return the verdict and the changes as JSON values."""
        return {"verdict": self.verdict, "changes": [asdict(one) for one in self.changes]}


def difference(before: Inspection, after: Inspection) -> Difference:
    """Return the numbers in which two inspections differ."""
    old, new = _numbers(before), _numbers(after)
    changes = (LedgerChange(*key, old.get(key), new.get(key)) for key in {**old, **new})
    return Difference(before, after, tuple(c for c in changes if c.before != c.after))


def _numbers(inspection: Inspection) -> dict[tuple[str, str], Value]:
    ledger = inspection.ledger
    found: dict[tuple[str, str], Value] = {
        ("mesh", "axes"): describe_mesh(ledger.axes),
        ("mesh", "device"): f"{ledger.devices} x {inspection.device_kind}",
        ("FLOPs", "program"): ledger.flops_high,
        ("FLOPs", "ideal"): inspection.ideal_flops,
    }
    if ledger.flops_low != ledger.flops_high:
        found["FLOPs", "at least"] = ledger.flops_low
    for name, size in inspection.arguments.items():
        found["memory", f"{name.replace(' ', '_')}_bytes"] = size
    for name in ("temp_bytes", "output_bytes", "alias_bytes", "code_bytes", "peak_bytes"):
        found["memory", name] = getattr(ledger.memory, name)
    if inspection.step_time is not None:
        found |= _seconds(inspection.step_time)
    for row in by_kind(ledger):
        of = f"{row.label}: {row.kind}"
        found[of, "times"] = row.times
        found[of, "dtype"] = " ".join(row.dtypes)
        for what in ("payload_bytes", "sent_bytes", "overlapped_bytes"):
            found[of, what] = getattr(row, what)
    return found


def _seconds(step_time: StepTime) -> dict[tuple[str, str], Value]:
    found: dict[tuple[str, str], Value] = {
        ("predicted", "step_seconds"): step_time.seconds,
        ("predicted", "compute_seconds"): step_time.compute_seconds,
    }
    if step_time.bubble_seconds:
        found["predicted", "bubble_seconds"] = step_time.bubble_seconds
    for axes, seconds in step_time.exposed_seconds.items():
        found["predicted", f"waits for {axes}_seconds"] = seconds
    return found


def print_difference(difference: Difference, console: Console) -> None:
    """Print a table of the changes, or a sentence if there are no changes."""
    console.print(f"before {difference.before.config}", soft_wrap=True, markup=False)
    console.print(f"after  {difference.after.config}", soft_wrap=True, markup=False)
    console.print()
    if difference.changes:
        made = table("Changes on each device in one step", "", "what", "before", "after", "x")
        previous = None
        for change in difference.changes:
            label = "" if change.of == previous else change.of
            previous = change.of
            what = change.what.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")
            cells = (_show(change.what, value) for value in (change.before, change.after))
            made.add_row(label, what, *cells, _factor(change))
        console.print(made)
        return
    verdicts = {
        "same program": "This setting changed nothing: both train steps compile to the same "
        "program.",
        "same numbers": (
            "The two programs differ, but only in instructions or constants: their collectives, "
            "bytes, FLOPs and memory are equal."
        ),
    }
    console.print(verdicts[difference.verdict])


def _show(what: str, value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if what.endswith("_seconds"):
        return show_number(value, "s")
    return show_bytes(value) if what.endswith("_bytes") else show_number(value)


def _factor(change: LedgerChange) -> str:
    numbers = (change.before, change.after)
    if any(isinstance(value, str) or not value for value in numbers):
        return ""
    before, after = numbers
    assert isinstance(before, int | float)
    assert isinstance(after, int | float)
    return f"{after / before:.3f}"
