"""`jaxdist pipeline show` and `check`: the bubble, activations and messages of a single schedule.

Neither a device nor jax is needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxdist.columns import table
from jaxdist.config.describe import tags
from jaxdist.config.document import Document, Node, Origin
from jaxdist.config.explain import explain_problems
from jaxdist.config.override import apply_override
from jaxdist.config.schema import problems_error
from jaxdist.errors import ConfigError, RunError, os_errors_as
from jaxdist.pipeline_schedules.build import PipelineScheduleConfig
from jaxdist.pipeline_schedules.check import ring_sizes
from jaxdist.pipeline_schedules.costs import CostsConfig
from jaxdist.pipeline_schedules.csv_form import Csv, read_csv, write_csv
from jaxdist.pipeline_schedules.draw.svg import draw_svg
from jaxdist.pipeline_schedules.draw.text import draw_text
from jaxdist.pipeline_schedules.draw.trace import chrome_trace
from jaxdist.pipeline_schedules.schedule import Schedule, TaskKind
from jaxdist.pipeline_schedules.simulate import Timeline, simulate
from jaxdist.types import JsonObject

COMMAND_LINE = Origin("the command line")
ALTERNATIVES: dict[str, type[Any]] = tags(PipelineScheduleConfig)
"""The classes among `PipelineScheduleConfig`, by the schedule's type."""


class Request(NamedTuple):
    """The requested schedule, and the costs of its tasks."""

    config: PipelineScheduleConfig
    costs: CostsConfig


def show_schedule(
    schedule: str,
    overrides: Iterable[str] = (),
    *,
    stages: int | None = None,
    microbatches: int | None = None,
    svg: Path | None = None,
    trace: Path | None = None,
    csv: Path | None = None,
    console: Console,
) -> Timeline:
    """Draw a schedule at the console's width, print its measures, and return its timeline.

    Args:
      schedule: a type of `PipelineScheduleConfig`, or the path of a CSV file.
      overrides: `key=value` overrides of the schedule, and `costs.key=value` overrides of its
        times.
      stages, microbatches: the numbers of stages and microbatches, or None for the numbers in a CSV
        file.
      svg: a file for a picture, or None to draw none.
      trace: a file for a trace that Perfetto reads, or None to write none.
      csv: a CSV file for the schedule, or None to write none.
      console: the console that shows the drawing.

    Raises:
      ConfigError: a setting or a CSV file is invalid, or the schedule refuses these sizes.
      RunError: a file cannot be written.
    """
    request = read_request(schedule, overrides)
    timeline = simulate(build_requested(request, stages, microbatches), request.costs.costs())
    picture = draw_text(timeline, console.width, colour=console.is_terminal)
    console.print(Text.from_ansi(picture))
    console.print(_together(timeline))
    console.print()
    console.print(_by_stage(timeline))
    for path, what, write in (
        (svg, "picture", lambda path: path.write_text(draw_svg(timeline), "utf-8")),
        (trace, "trace", lambda path: path.write_text(json.dumps(chrome_trace(timeline)), "utf-8")),
        (csv, "schedule", lambda path: write_csv(timeline.schedule, path)),
    ):
        if path is not None:
            with os_errors_as(
                RunError, f"cannot write the {what} to {path}", "choose another file"
            ):
                write(path)
            console.print(f"{what}: {path}", markup=False, soft_wrap=True)
    return timeline


def read_request(schedule: str, overrides: Iterable[str] = ()) -> Request:
    """Return the schedule and the costs that arguments of `show_schedule` request.

    Raises:
      ConfigError: settings are invalid. The message has a line for each invalid setting.

    >>> read_request("interleaved", ["chunks=4", "costs.transfer=0.5"]).config
    Interleaved(type='interleaved', chunks=4)
    """
    section = {"type": schedule}
    if schedule not in ALTERNATIVES and _is_path(schedule):
        section = {"type": "csv", "path": schedule}
    document = document_of(overrides, section)
    settings = dict(document.values)
    times = settings.pop("costs", {})
    problems = [
        *explain_problems(PipelineScheduleConfig, settings),
        *explain_problems(CostsConfig, times, ("costs",)),
    ]
    if problems:
        raise problems_error(document, problems)
    # The values are validated as JSON, since the strict validation of Python values would refuse a
    # list where a tuple is declared.
    costs = CostsConfig.model_validate_json(json.dumps(times))
    config = TypeAdapter(PipelineScheduleConfig).validate_json(json.dumps(settings))
    return Request(with_costs(config, costs), costs)


def build_requested(request: Request, stages: int | None, microbatches: int | None) -> Schedule:
    """Build and return the schedule that arguments of `show_schedule` request.

    Args:
      request: the schedule and its costs.
      stages, microbatches: the numbers of stages and microbatches, or None for the numbers in a CSV
        file.

    Raises:
      ConfigError: a number is missing, or the schedule refuses a number.
    """
    config = request.config
    if isinstance(config, Csv):
        found = read_csv(config.path)
        return config.build(stages or found.stages, microbatches or found.microbatches)
    if stages is None or microbatches is None:
        raise ConfigError(
            f"schedule {config.type}: --stages is {stages or 'not given'} and --microbatches is "
            f"{microbatches or 'not given'}: give both options; only the CSV file of a schedule "
            "makes the options unnecessary"
        )
    return config.build(stages, microbatches)


def check_csv(path: Path, *, console: Console) -> Schedule:
    """Check a CSV file of a schedule, and return the schedule.

    The sizes of the schedule and of its ring buffers are printed.

    Raises:
      ConfigError: the file cannot be read, or breaks a rule. The message has the first violation.
    """
    schedule = read_csv(path)
    kinds = {task.kind for stage in range(schedule.stages) for task in schedule.tasks(stage)}
    backward = "forward only"
    if kinds - {TaskKind.FORWARD}:
        backward = "backward in halves" if TaskKind.WEIGHT in kinds else "backward whole"
    for line in (
        f"{path} is valid: {schedule.stages} stages, {schedule.chunks} chunks, "
        f"{schedule.microbatches} microbatches, {backward}",
        f"slots of the ring buffer of each chunk: {' '.join(map(str, ring_sizes(schedule)))}",
    ):
        console.print(line, markup=False, soft_wrap=True)
    return schedule


def _is_path(text: str) -> bool:
    return text.endswith(".csv") or os.sep in text or os.path.isfile(text)


def document_of(overrides: Iterable[str], section: Mapping[str, str] | None = None) -> Document:
    """Return a document with the values of a section and of overrides.

    Args:
      overrides: `key=value` overrides from the command line.
      section: the values before the overrides, or None for no values.
    """
    chosen = {key: Node(value, COMMAND_LINE) for key, value in (section or {}).items()}
    root = Node(chosen, COMMAND_LINE)
    for text in overrides:
        root = apply_override(root, text)
    return Document(root.plain(), root.origins(), Path(str(COMMAND_LINE)))


def with_costs(config: PipelineScheduleConfig, costs: CostsConfig) -> PipelineScheduleConfig:
    """Return the config of a schedule with the given costs.

    The config of a schedule that does not depend on costs is returned unchanged.
    """
    if "costs" in type(config).model_fields:
        return config.model_copy(update={"costs": costs})
    return config


def _together(timeline: Timeline) -> str:
    return (
        f"makespan {timeline.makespan:.4g} if all stages end together (bubble "
        f"{timeline.flushed_bubble_fraction:.1%})"
    )


def schedule_json(schedule: Schedule, timeline: Timeline | None = None) -> JsonObject:
    """Return the measures of a schedule as JSON values.

    Args:
      schedule: the schedule to measure.
      timeline: the timeline, to include the measures that `show` prints, or None for only the
        measures that `check` prints.
    """
    report: JsonObject = {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "chunks": schedule.chunks,
        "microbatches": schedule.microbatches,
    }
    if timeline is None:
        return {**report, "slots": list(ring_sizes(schedule))}
    rows = zip(
        timeline.busy, timeline.peak_activations, timeline.sent, timeline.received, strict=True
    )
    names = ("works", "peak", "sends", "receives")
    by_stage = [dict(zip(names, row, strict=True)) for row in rows]
    return {**report, **timeline.as_json(), "by_stage": by_stage}


def _by_stage(timeline: Timeline) -> Table:
    schedule = timeline.schedule
    made = table(None, "stage", "chunks", "works", "waits", "peak", "sends", "receives")
    for stage, busy in enumerate(timeline.busy):
        chunks = [str(c) for c, home in enumerate(schedule.placement) if home == stage]
        made.add_row(
            str(stage),
            " ".join(chunks),
            f"{busy:.4g}",
            f"{timeline.period - busy:.4g}",
            f"{timeline.peak_activations[stage]:.4g}",
            str(timeline.sent[stage]),
            str(timeline.received[stage]),
        )
    return made
