"""The tables of an inspection, which fit into 80 columns."""

from __future__ import annotations

from rich.console import Console

from jaxdist.columns import table
from jaxdist.inspect.program import Inspection
from jaxdist.inspect.rows import (
    CollectiveRow,
    by_axes,
    by_kind,
    show_bytes,
    show_number,
    show_ratio,
)
from jaxdist.inspect.servers import WorkerPart
from jaxdist.inspect.times import show_seconds
from jaxdist.mesh import describe_mesh


def print_inspection(inspection: Inspection, console: Console) -> None:
    """Print tables of collectives, bytes with their bound, FLOPs, memory and servers."""
    _print_head(inspection, console)
    _print_collectives(inspection, console)
    _print_flops(inspection, console)
    _print_memory(inspection, console)
    if inspection.worker is not None:
        _print_servers(inspection.worker, console)


def _print_head(inspection: Inspection, console: Console) -> None:
    ledger = inspection.ledger
    for name, text in (
        ("config", inspection.config),
        ("model", inspection.model),
        ("mesh", f"{describe_mesh(ledger.axes)} on {ledger.devices} x {inspection.device_kind}"),
        ("step", f"{inspection.step}; compiled in {inspection.compile_seconds:.1f} s"),
    ):
        console.print(f"{name:<7}{text}", soft_wrap=True, markup=False)


def _print_collectives(inspection: Inspection, console: Console) -> None:
    rows = by_kind(inspection.ledger)
    console.print()
    if not rows:
        console.print("The step has no collectives: the devices send no data to one another.")
        return
    kinds = table(
        "Collectives, on each device in one step", "axis", "kind", "dtype", "times", "payload",
        "sent",
    )  # fmt: skip
    for row in rows:
        kinds.add_row(
            row.label, row.kind, " ".join(row.dtypes), row.times,
            show_bytes(row.payload_bytes), show_bytes(row.sent_bytes),
        )  # fmt: skip
    console.print(kinds)
    console.print()
    totals = table(
        "Bytes sent, against the lower bound", "axis", "sent", "bound", "of bound",
        "overlapped", "exposed",
    )  # fmt: skip
    unbounded = []
    for row in by_axes(inspection.ledger, inspection.gradient_axes):
        bound = bound_bytes(inspection, row)
        if bound is None:
            unbounded.append(row.label)
        totals.add_row(
            row.label, show_bytes(row.sent_bytes),
            "-" if bound is None else show_bytes(bound), show_ratio(row.sent_bytes, bound),
            show_bytes(row.overlapped_bytes), show_bytes(row.exposed_bytes),
        )  # fmt: skip
    console.print(totals)
    for line in _bound_notes(inspection, unbounded):
        console.print(line, style="dim")


def _bound_notes(inspection: Inspection, unbounded: list[str]) -> list[str]:
    notes = []
    if loops := inspection.ledger.unknown_loops:
        notes.append(
            "The number of iterations of these loops is unknown, so each is counted as a single "
            f"iteration: {', '.join(loops)}; the step may send more bytes."
        )
    if inspection.gradient_bound_bytes:
        axes = " x ".join(inspection.gradient_axes)
        assumed, *more = inspection.bound_notes
        notes.append(f"Bound of {axes}: {assumed}.")
        if more:
            notes.append(f"This bound leaves out that {', that '.join(more)}.")
    if unbounded:
        notes.append(f"No bound is known for {', '.join(unbounded)}.")
    return notes


def bound_bytes(inspection: Inspection, row: CollectiveRow) -> float | None:
    """Return the least bytes that a device must send along a row's axes.

    The result is None if no bound is known for these axes.
    """
    if row.axes == inspection.gradient_axes and inspection.gradient_bound_bytes:
        return inspection.gradient_bound_bytes
    return None


def _print_flops(inspection: Inspection, console: Console) -> None:
    ledger, ideal = inspection.ledger, inspection.ideal_flops
    flops = table("FLOPs of each device in one step", "", "program", "ideal", "of ideal")
    shown = show_number(ledger.flops_high)
    if ledger.flops_low != ledger.flops_high:
        shown = f"{show_number(ledger.flops_low)}-{shown}"
    flops.add_row("matmul, conv", shown, show_number(ideal), show_ratio(ledger.flops_high, ideal))
    console.print()
    console.print(flops)
    whose = "the model's and the optimizer's" if inspection.update_flops else "the model's"
    console.print(f"Ideal: {whose}, without recomputing, divided by the devices.", style="dim")


def _print_memory(inspection: Inspection, console: Console) -> None:
    memory, limit = inspection.ledger.memory, inspection.memory_bytes
    whole = "device" if limit is None else f"of {show_bytes(limit)}"
    made = table(f"Memory of each device ({inspection.device_kind})", "", "bytes", whole)
    parts = {
        **inspection.arguments,
        "temporaries": memory.temp_bytes,
        "outputs, new": memory.output_bytes - memory.alias_bytes,
        "code": memory.code_bytes,
        "peak": memory.peak_bytes,
    }
    for name, size in parts.items():
        if size:
            made.add_row(name, show_bytes(size), f"{size / limit:.2%}" if limit else "-")
    console.print()
    console.print(made)
    if inspection.host_copied_bytes:
        console.print(_on_host(inspection), style="dim", soft_wrap=True)


def _on_host(inspection: Inspection) -> str:
    """Return sentences on the price of state and parameters in the host's memory."""
    parts = {
        "the optimizer's state": inspection.host_state_bytes,
        "the parameters": inspection.host_parameter_bytes,
    }
    held = " and ".join(f"{show_bytes(size)} of {name}" for name, size in parts.items() if size)
    seconds = inspection.host_seconds
    spent = "an unknown time" if seconds is None else f"{show_seconds(seconds)} without overlap"
    return (
        f"The host's memory holds {held} of each device. A step copies "
        f"{show_bytes(inspection.host_copied_bytes)} over the link between host and device, in "
        f"{spent}."
    )


def _print_servers(part: WorkerPart, console: Console) -> None:
    """Print the state and the traffic of each parameter server."""
    made = table(
        "Servers, and their bytes in a clock of all clients", "server", "parameters", "optimizer",
        "received", "sent",
    )  # fmt: skip
    for one in part.servers:
        made.add_row(
            str(one.number), show_bytes(one.parameter_bytes),
            show_bytes(one.optimizer_bytes), show_bytes(one.received_bytes),
            show_bytes(one.sent_bytes),
        )  # fmt: skip
    console.print()
    console.print(made)
