"""`jaxdist pipeline`: looks at schedules. No device, and no jax."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

from pydantic import Field, TypeAdapter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxdist.config.document import Document, Node, Origin
from jaxdist.config.explain import explain
from jaxdist.config.override import apply_override
from jaxdist.config.schema import Config, problems_error, validate
from jaxdist.errors import ConfigError, RunError
from jaxdist.parallel.pipeline.draw.svg import write_svg
from jaxdist.parallel.pipeline.draw.text import draw_text
from jaxdist.parallel.pipeline.draw.trace import write_trace
from jaxdist.parallel.pipeline.planning.costs import CostsConfig, Time
from jaxdist.parallel.pipeline.schedules.build import PipelineScheduleConfig
from jaxdist.parallel.pipeline.schedules.check import ring_sizes
from jaxdist.parallel.pipeline.schedules.csv_form import Csv, read_csv, write_csv
from jaxdist.parallel.pipeline.schedules.schedule import Schedule, TaskKind
from jaxdist.parallel.pipeline.schedules.simulate import Timeline, simulate

COMMAND_LINE = Origin("the command line")
ALTERNATIVES: dict[str, type[Any]] = {
    alternative.model_fields["type"].default: alternative
    for alternative in get_args(get_args(PipelineScheduleConfig)[0])
}
"""The classes of `PipelineScheduleConfig` by type."""
AUTO_MEMORY = (1.0, 2.0)
"""Limits under which `compare` shows schedules that take one."""


class Request(NamedTuple):
    """One schedule, and the times under which it is looked at."""

    config: PipelineScheduleConfig
    costs: CostsConfig


class StageCosts(Config):
    """What a whole stage's tasks take, whatever the number of its chunks."""

    forward: Time = 1.0
    """Time of a microbatch's forward pass through a stage, in any unit."""
    backward_input: Time = 1.0
    """Time of the input half of its backward pass."""
    backward_weight: Time = 1.0
    """Time of the weight half."""
    transfer: Time = 0.0
    """Time of a message from one stage to another."""

    def of_chunks(self, count: int) -> CostsConfig:
        """The times of one of `count` chunks of a stage; a message takes as long as before."""
        return CostsConfig(
            forward=self.forward / count,
            backward_input=self.backward_input / count,
            backward_weight=self.backward_weight / count,
            transfer=self.transfer,
        )


class Comparison(Config):
    """What all schedules of a comparison have in common."""

    chunks: Annotated[int, Field(ge=2, le=1024)] = 2
    """Chunks on each stage, for the schedules that let one choose."""
    costs: StageCosts = StageCosts()
    """What the tasks of a stage take."""


@dataclass(frozen=True)
class Entry:
    """One schedule of a comparison.

    Attributes:
      label: its type, and what was chosen for it.
      timeline: None where it is refused.
      reason: why it is refused.
      least: the fewest microbatches it takes on these stages.
      whole_rounds: it takes multiples of `least` only.
    """

    label: str
    timeline: Timeline | None
    reason: str
    least: int
    whole_rounds: bool


def show(
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
    """Draw a schedule at the console's width, and print its figures.

    Args:
      schedule: a type of `PipelineScheduleConfig`, or the path of a CSV file.
      overrides: `key=value` of the schedule, `costs.key=value` of its times.
      stages, microbatches: of a CSV file those found in it, where not given.
      svg, trace, csv: files to write.

    Raises:
      ConfigError: a setting that does not fit, a schedule that refuses these sizes, a CSV file that
        is not a whole schedule.
      RunError: a file cannot be written.
    """
    request = read_request(schedule, overrides)
    timeline = simulate(build(request, stages, microbatches), request.costs.costs())
    picture = draw_text(timeline, console.width, colour=console.is_terminal)
    console.print(Text.from_ansi(picture))
    console.print(_together(timeline))
    console.print()
    console.print(_by_stage(timeline))
    for path, what, write in (
        (svg, "picture", lambda path: write_svg(timeline, path)),
        (trace, "trace", lambda path: write_trace(timeline, path)),
        (csv, "schedule", lambda path: write_csv(timeline.schedule, path)),
    ):
        if path is not None:
            _write(path, what, write)
            console.print(f"{what}: {path}", markup=False, soft_wrap=True)
    return timeline


def read_request(schedule: str, overrides: Iterable[str] = ()) -> Request:
    """What `show` is asked for.

    Raises:
      ConfigError: one line for each setting that does not fit.

    >>> read_request("interleaved", ["chunks=4", "costs.transfer=0.5"]).config
    Interleaved(type='interleaved', chunks=4)
    """
    section = {"type": schedule}
    if schedule not in ALTERNATIVES and _is_path(schedule):
        section = {"type": "csv", "path": schedule}
    document = _document(overrides, section)
    settings = dict(document.values)
    times = settings.pop("costs", {})
    problems = [
        *explain(PipelineScheduleConfig, settings),
        *explain(CostsConfig, times, ("costs",)),
    ]
    if problems:
        raise problems_error(document, problems)
    costs = CostsConfig.model_validate_json(json.dumps(times))
    config = TypeAdapter(PipelineScheduleConfig).validate_json(json.dumps(settings))
    return Request(_with_costs(config, costs), costs)


def build(request: Request, stages: int | None, microbatches: int | None) -> Schedule:
    """The schedule that is asked for; a CSV file says itself how large it is.

    Raises:
      ConfigError: no size, or one that the schedule refuses.
    """
    config = request.config
    if isinstance(config, Csv):
        found = read_csv(config.path)
        return config.build(stages or found.stages, microbatches or found.microbatches)
    if stages is None or microbatches is None:
        raise ConfigError(
            f"schedule {config.type}: --stages is {stages or 'not given'} and --microbatches "
            f"is {microbatches or 'not given'}: give both; only a CSV file says them itself"
        )
    return config.build(stages, microbatches)


def compare(
    overrides: Iterable[str] = (), *, stages: int, microbatches: int, console: Console
) -> list[Entry]:
    """Print a table of all schedules that a config can name, for these stages and microbatches.

    Args:
      overrides: `key=value` of `Comparison`. Costs are those of a stage: one that holds several
        chunks has as much to do as one that holds one.

    Raises:
      ConfigError: a setting that does not fit.
    """
    common = validate(_document(overrides), Comparison)
    entries = [
        _entry(label, config, common.costs, stages, microbatches)
        for label, config in _alternatives(common.chunks)
    ]
    console.print(_comparison(entries, stages, microbatches))
    console.print(
        "bubble: where a stage may begin its next step before the others end; flushed: where all "
        "end together. peak: activations, in microbatches through a whole stage. least: the "
        f"fewest microbatches. {_choices(common.chunks)}"
    )
    for entry in entries:
        if entry.timeline is None:
            console.print(f"refused: {entry.reason}", markup=False)
    return entries


def check(path: Path, *, console: Console) -> Schedule:
    """Say that a CSV file is a whole schedule, and what its ring buffers need.

    Raises:
      ConfigError: the file cannot be read, or breaks a rule: the first violation.
    """
    schedule = read_csv(path)
    kinds = {task.kind for stage in range(schedule.stages) for task in schedule.tasks(stage)}
    backward = "forward only"
    if kinds - {TaskKind.FORWARD}:
        backward = "backward in halves" if TaskKind.WEIGHT in kinds else "backward whole"
    for line in (
        f"{path} is whole: {schedule.stages} stages, {schedule.chunks} chunks, "
        f"{schedule.microbatches} microbatches, {backward}",
        f"slots of the ring buffers, by chunk: {' '.join(map(str, ring_sizes(schedule)))}",
    ):
        console.print(line, markup=False, soft_wrap=True)
    return schedule


def _is_path(text: str) -> bool:
    return text.endswith(".csv") or os.sep in text or Path(text).is_file()


def _document(overrides: Iterable[str], section: Mapping[str, str] | None = None) -> Document:
    """What the command line says: a section, with the overrides on top."""
    chosen = {key: Node(value, COMMAND_LINE) for key, value in (section or {}).items()}
    root = Node(chosen, COMMAND_LINE)
    for text in overrides:
        root = apply_override(root, text)
    return Document(root.plain(), root.origins(), Path(str(COMMAND_LINE)))


def _with_costs(config: PipelineScheduleConfig, costs: CostsConfig) -> PipelineScheduleConfig:
    """A schedule that is made for given times, made for these."""
    if "costs" in type(config).model_fields:
        return config.model_copy(update={"costs": costs})
    return config


def _together(timeline: Timeline) -> str:
    return (
        f"makespan {timeline.makespan:.4g}, where all stages end together "
        f"(bubble {timeline.flushed_bubble_fraction:.1%})"
    )


def _by_stage(timeline: Timeline) -> Table:
    schedule = timeline.schedule
    table = _table(["stage", "chunks", "works", "waits", "peak", "sends", "receives"])
    for stage, busy in enumerate(timeline.busy):
        chunks = [str(c) for c, home in enumerate(schedule.placement) if home == stage]
        table.add_row(
            str(stage),
            " ".join(chunks),
            f"{busy:.4g}",
            f"{timeline.period - busy:.4g}",
            f"{timeline.peak_activations[stage]:.4g}",
            str(timeline.sent[stage]),
            str(timeline.received[stage]),
        )
    return table


def _table(columns: Sequence[str], title: str | None = None) -> Table:
    """The first column to the left, numbers to the right."""
    table = Table(title=title, title_justify="left", show_edge=False)
    for index, column in enumerate(columns):
        justify = "right" if index else "left"
        table.add_column(column, justify=justify, overflow="fold")
    return table


def _write(path: Path, what: str, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise RunError(
            f"cannot write the {what} to {path}: {error.strerror}; choose another file"
        ) from None


def _alternatives(chunks: int) -> Iterator[tuple[str, PipelineScheduleConfig]]:
    """Every schedule with a generator, with its label."""
    for name, alternative in ALTERNATIVES.items():
        fields = alternative.model_fields
        if "chunks" in fields:
            yield name, alternative(chunks=chunks)
        elif "memory_limit" in fields:
            for limit in AUTO_MEMORY:
                yield f"{name} {limit:g}x", alternative(memory_limit=limit)
        elif alternative is not Csv:
            yield name, alternative()


def _entry(
    label: str, config: PipelineScheduleConfig, costs: StageCosts, stages: int, microbatches: int
) -> Entry:
    least, smallest = next(
        (count, made)
        for count in itertools.count(1)
        if isinstance(made := _made(config, stages, count), Schedule)
    )
    rounds = isinstance(_made(config, stages, least + 1), str)
    of_chunk = costs.of_chunks(smallest.chunks // stages)
    made = _made(_with_costs(config, of_chunk), stages, microbatches)
    if isinstance(made, str):
        return Entry(label, None, made, least, rounds)
    return Entry(label, simulate(made, of_chunk.costs()), "", least, rounds)


def _choices(chunks: int) -> str:
    """What was chosen for the schedules that leave a choice."""
    found = {
        field: [name for name, kind in ALTERNATIVES.items() if field in kind.model_fields]
        for field in ("chunks", "memory_limit")
    }
    limits = ", ".join(f"{limit:g}x" for limit in AUTO_MEMORY)
    return (
        f"{', '.join(found['chunks'])}: {chunks} chunks a stage. "
        f"{', '.join(found['memory_limit'])} {limits}: within so many times 1F1B's peak."
    )


def _made(config: PipelineScheduleConfig, stages: int, microbatches: int) -> Schedule | str:
    """The schedule, or why there is none."""
    try:
        return config.build(stages, microbatches)
    except ConfigError as error:
        return str(error)


def _comparison(entries: Sequence[Entry], stages: int, microbatches: int) -> Table:
    columns = ("schedule", "bubble", "flushed", "makespan", "peak", "messages", "least")
    table = _table(columns, f"{stages} stages, {microbatches} microbatches")
    for entry in entries:
        least = f"{entry.least}, {2 * entry.least} .." if entry.whole_rounds else str(entry.least)
        found = entry.timeline
        figures = ("refused", "", "", "", "")
        if found is not None:
            figures = (
                f"{found.bubble_fraction:.1%}",
                f"{found.flushed_bubble_fraction:.1%}",
                f"{found.makespan:.4g}",
                f"{found.peak:.4g}",
                str(found.messages),
            )
        table.add_row(entry.label, *figures, least)
    return table
