"""`jaxdist inspect`: the cost of a train step, read from the compiled program before any run."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from jaxdist.config import read
from jaxdist.config.importing import foreign_code
from jaxdist.errors import ConfigError, RunError
from jaxdist.inspect.diff import Difference, difference, print_difference
from jaxdist.inspect.program import Inspection, inspect_step, open_subject
from jaxdist.inspect.rows import CollectiveRow, by_axes, by_kind
from jaxdist.inspect.tables import bound_bytes, print_inspection
from jaxdist.inspect.times import draw_times, print_times, times_json
from jaxdist.metrics.report import PACKAGES, write_json
from jaxdist.runtime import environment
from jaxdist.types import JsonObject


def inspect(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    topology: str | None = None,
    other: Path | None = None,
    changes: Sequence[str] = (),
    json_file: Path | None = None,
    plot: Path | None = None,
    console: Console,
) -> Inspection | Difference:
    """Compile a train step, print its cost, and return the facts about the step.

    With `other` or `changes`, a second train step is compiled too. The function then prints and
    returns the differences between the two steps instead.

    Args:
      path: the configuration file, to which `overrides` are applied.
      topology: the TPUs to compile for, such as `v5e:2x4`, or None for the devices of jax.
      other: the configuration file of the second step, to which `overrides` and then `changes` are
        applied, or None for `path`.
      changes: the settings of the second step.
      json_file: a file for the same facts as JSON, or None to write none.
      plot: a directory for a picture of the predicted step, or None to draw none. A picture is
        possible only for TPUs and a single step.
      console: the console for the tables.

    Raises:
      JaxdistError: a config or an option is invalid, a program is too large for the device, or a
        file cannot be written.
    """
    if plot is not None and (topology is None or other is not None or changes):
        raise ConfigError(
            "--plot draws the predicted step of a single program for TPUs: add --topology, and "
            "leave out --diff and --diff-set"
        )
    for file in dict.fromkeys([path, other or path]):
        for text in foreign_code(read(file, overrides).values):
            console.print(f"code   {text}", soft_wrap=True, markup=False)
    first = open_subject(path, overrides, topology)
    for text in first.experiment.explained:
        console.print(f"plan   {escape(text)}", soft_wrap=True)
    for notice in first.experiment.notices:
        console.print(f"[bold yellow]warning:[/] {escape(notice)}", soft_wrap=True)
    result: Inspection | Difference
    if other is None and not changes:
        result = inspect_step(first)
        _print(result, plot, console)
        report = inspection_json(result)
    else:
        # The second config is checked first, since the compilation of the first may take minutes.
        second = open_subject(other or path, [*overrides, *changes], topology)
        result = difference(inspect_step(first), inspect_step(second))
        print_difference(result, console)
        report = {
            "before": inspection_json(result.before),
            "after": inspection_json(result.after),
            "diff": result.to_json(),
        }
    if json_file is not None:
        versions = environment.versions((*PACKAGES, "libtpu")) | {"platform": platform.platform()}
        write_json(json_file, {"versions": versions, **report}, what="inspection")
    return result


def _print(found: Inspection, plot: Path | None, console: Console) -> None:
    print_inspection(found, console)
    print_times(found, console)
    if plot is not None:
        if found.step_time is None:
            raise RunError(
                f"--plot: no time is predicted for {found.device_kind}: leave out --plot, or "
                "compile for a TPU with --topology, such as v5e:2x4"
            )
        console.print(f"drawn in {draw_times(found, plot)}", soft_wrap=True)


def inspection_json(inspection: Inspection) -> JsonObject:
    """Return everything that the tables of an inspection show, and its ledger, as JSON values."""
    ledger = inspection.ledger
    ideal = inspection.ideal_flops
    return {
        "config": inspection.config,
        "model": inspection.model,
        "step": inspection.step,
        "devices": {"kind": inspection.device_kind, "count": ledger.devices, "axes": ledger.axes},
        "compile_seconds": inspection.compile_seconds,
        "program_sha256": inspection.program_sha256,
        "axes": [_axes_json(inspection, row) for row in by_axes(ledger, inspection.gradient_axes)],
        "collectives": [_row_json(row) for row in by_kind(ledger)],
        "flops": {
            "low": ledger.flops_low,
            "high": ledger.flops_high,
            "ideal": ideal,
            "ratio": ledger.flops_high / ideal if ideal else None,
        },
        "time": times_json(inspection),
        "memory": {
            "device_bytes": inspection.memory_bytes,
            "host_state_bytes": inspection.host_state_bytes,
            "host_parameter_bytes": inspection.host_parameter_bytes,
            "host_copied_bytes": inspection.host_copied_bytes,
            "host_seconds": inspection.host_seconds,
            "arguments": _snake(inspection.arguments),
            **ledger.to_json()["memory"],
        },
        "servers": inspection.worker and [asdict(one) for one in inspection.worker.servers],
        "ledger": ledger.to_json(),
    }


def _row_json(row: CollectiveRow) -> JsonObject:
    return asdict(row) | {"exposed_bytes": row.exposed_bytes}


def _axes_json(inspection: Inspection, row: CollectiveRow) -> JsonObject:
    bound = bound_bytes(inspection, row)
    ratio = row.sent_bytes / bound if bound else None
    notes = list(inspection.bound_notes) if bound else []
    return _row_json(row) | {"lower_bound_bytes": bound, "ratio": ratio, "bound_notes": notes}


def _snake(sizes: Mapping[str, int]) -> dict[str, int]:
    return {f"{name.replace(' ', '_')}_bytes": size for name, size in sizes.items()}
