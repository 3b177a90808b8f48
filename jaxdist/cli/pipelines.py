"""The commands for pipeline schedules, which need neither a device nor jax."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxdist.cli import shared

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings key=value of the schedule: chunks=2, costs.forward=1, "
        "costs.backward_input=1, ..."
    ),
]


def show(
    schedule: str,
    settings: Settings = None,
    *,
    stages: shared.AtLeastOneOrNone = None,
    microbatches: shared.AtLeastOneOrNone = None,
    svg: Path | None = None,
    trace: Path | None = None,
    csv: Path | None = None,
    json_file: shared.JsonFile = None,
) -> None:
    """Draw SCHEDULE, and print its bubble, activations and messages. Nothing is run.

    Args:
      schedule: Schedule: gpipe, 1f1b, interleaved, zb_h1, zb_auto, ..., or the CSV file of a
        schedule.
      stages: Number of pipeline stages; by default the number in the CSV file.
      microbatches: Number of microbatches of a batch; by default the number in the CSV file.
      svg: Draw the schedule into this file.
      trace: Write a trace for ui.perfetto.dev, in which 1 ms is a unit of time.
      csv: Write the schedule as a CSV file that torch.distributed.pipelining can read.
    """
    from jaxdist.commands.pipelines import schedule_json
    from jaxdist.commands.pipelines import show_schedule as look

    timeline = look(
        schedule,
        settings or [],
        stages=stages,
        microbatches=microbatches,
        svg=svg,
        trace=trace,
        csv=csv,
        console=shared.console(),
    )
    shared.write_result(
        json_file, "figures of the schedule", **schedule_json(timeline.schedule, timeline)
    )


def compare(
    settings: Settings = None,
    *,
    stages: shared.AtLeastOne,
    microbatches: shared.AtLeastOne,
    json_file: shared.JsonFile = None,
) -> None:
    """Print bubble, activations and messages of every schedule, given the times of a stage.

    Args:
      stages: Number of pipeline stages.
      microbatches: Number of microbatches of a batch.
    """
    from jaxdist.commands.compare_schedules import compare_schedules as judge

    given = {"stages": stages, "microbatches": microbatches, "json_file": json_file}
    judge(settings or [], console=shared.console(), **given)


def check(
    file: Path,
    *,
    json_file: shared.JsonFile = None,
) -> None:
    """Check a schedule in a CSV file.

    If the schedule breaks a rule, the first violation is printed, and the exit code is 2.

    Args:
      file: CSV file of the schedule, with a row for each stage.
    """
    from jaxdist.commands.pipelines import check_csv as judge
    from jaxdist.commands.pipelines import schedule_json

    schedule = judge(file, console=shared.console())
    shared.write_result(json_file, "sizes of the schedule", **schedule_json(schedule))
