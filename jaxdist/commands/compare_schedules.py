"""`jaxdist pipeline compare`: the measures of all schedules for the same stages.

Neither a device nor jax is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field
from rich.console import Console
from rich.table import Table

from jaxdist.columns import table
from jaxdist.commands.pipelines import ALTERNATIVES, document_of, with_costs
from jaxdist.config.schema import Config, validate
from jaxdist.errors import ConfigError
from jaxdist.metrics.report import write_json
from jaxdist.pipeline_schedules.build import PipelineScheduleConfig
from jaxdist.pipeline_schedules.costs import CostsConfig, Time
from jaxdist.pipeline_schedules.csv_form import Csv
from jaxdist.pipeline_schedules.schedule import Schedule
from jaxdist.pipeline_schedules.simulate import Timeline, simulate
from jaxdist.types import JsonObject

AUTO_MEMORY = (1.0, 2.0)
"""The memory limits with which a schedule is compared if it has the setting `memory_limit`."""


class StageCosts(Config):
    """The times of a microbatch's passes through a whole stage, which may have several chunks."""

    forward: Time = 1.0
    """The time of a microbatch's forward pass through a stage, in any unit."""
    backward_input: Time = 1.0
    """The time in which a backward pass through a stage computes the gradient of its input."""
    backward_weight: Time = 1.0
    """The time in which a backward pass through a stage computes the gradients of weights."""
    transfer: Time = 0.0
    """The time of a message from one stage to another."""

    def of_chunks(self, count: int) -> CostsConfig:
        """Return the costs of a chunk, for a stage that has `count` equal chunks.

        The time of a message does not depend on the number of chunks.
        """
        tasks = {name: time / count for name, time in self if name != "transfer"}
        return CostsConfig(**tasks, transfer=self.transfer)


class ComparisonConfig(Config):
    """The settings that all schedules of a comparison share."""

    chunks: Annotated[int, Field(ge=2, le=1024)] = 2
    """The number of chunks on each stage, for schedules with a setting `chunks`."""
    costs: StageCosts = StageCosts()
    """The times of a stage's tasks."""


@dataclass(frozen=True)
class ScheduleEntry:
    """A schedule of a comparison.

    Attributes:
      label: the type of the schedule, with the chosen settings.
      timeline: the timeline of the schedule, or None if the schedule is refused.
      reason: the reason for a refusal, or an empty string if the schedule is accepted.
      least: the smallest number of microbatches that the schedule accepts on this number of stages.
      whole_rounds: whether the schedule accepts only multiples of `least` microbatches.
    """

    label: str
    timeline: Timeline | None
    reason: str
    least: int
    whole_rounds: bool

    def as_json(self) -> JsonObject:
        """Return the schedule's columns of the table as JSON values, without rounding.

        The measures, such as the bubble, are None if the schedule is refused.
        """
        names = ("bubble", "flushed_bubble", "makespan", "peak", "messages")
        figures: JsonObject = dict.fromkeys(names)
        if self.timeline is not None:
            figures = self.timeline.as_json()
        return {
            "schedule": self.label,
            **figures,
            "refused": self.reason or None,
            "least_microbatches": self.least,
            "multiples_only": self.whole_rounds,
        }


def compare_schedules(
    overrides: Iterable[str] = (),
    *,
    stages: int,
    microbatches: int,
    json_file: Path | None = None,
    console: Console,
) -> list[ScheduleEntry]:
    """Print a table of all schedules that a config can name, and return its rows.

    Args:
      overrides: `key=value` overrides of `ComparisonConfig`. The costs are times of a whole stage,
        which may have several chunks.
      stages: the number of stages of each schedule.
      microbatches: the number of microbatches of a batch.
      json_file: a file for the rows as JSON, or None to write none.
      console: the console that prints the table.

    Raises:
      ConfigError: an override is invalid.
      RunError: the file cannot be written.
    """
    common = validate(document_of(overrides), ComparisonConfig)
    entries = [
        _entry(label, config, common.costs, stages, microbatches)
        for label, config in _alternatives(common.chunks)
    ]
    console.print(_comparison(entries, stages, microbatches))
    console.print(
        "bubble: the idle fraction of the time if a stage may begin its next step before other "
        "stages end. flushed: the idle fraction if all stages wait for the end of the step. peak: "
        "the most activations that a stage keeps at a time, in microbatches. least: the smallest "
        f"number of microbatches that the schedule allows. {_choices(common.chunks)}"
    )
    for entry in entries:
        if entry.timeline is None:
            console.print(f"refused: {entry.reason}", markup=False)
    rows = [entry.as_json() for entry in entries]
    report = {"stages": stages, "microbatches": microbatches, "schedules": rows}
    write_json(json_file, report, what="comparison")
    return entries


def _alternatives(chunks: int) -> Iterator[tuple[str, PipelineScheduleConfig]]:
    """Yield a label and the config of every schedule that is generated and not read from a file."""
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
) -> ScheduleEntry:
    least, smallest = next(
        (count, made)
        for count in itertools.count(1)
        if isinstance(made := _made(config, stages, count), Schedule)
    )
    # A schedule that refuses `least` + 1 microbatches accepts only multiples of `least`.
    rounds = isinstance(_made(config, stages, least + 1), str)
    of_chunk = costs.of_chunks(smallest.chunks // stages)
    made = _made(with_costs(config, of_chunk), stages, microbatches)
    if isinstance(made, str):
        return ScheduleEntry(label, None, made, least, rounds)
    return ScheduleEntry(label, simulate(made, of_chunk.costs()), "", least, rounds)


def _choices(chunks: int) -> str:
    """Return a sentence that gives the `chunks` and `memory_limit` of the compared schedules."""
    found = {
        field: [name for name, kind in ALTERNATIVES.items() if field in kind.model_fields]
        for field in ("chunks", "memory_limit")
    }
    limits = ", ".join(f"{limit:g}x" for limit in AUTO_MEMORY)
    return (
        f"{', '.join(found['chunks'])}: {chunks} chunks on each stage. "
        f"{', '.join(found['memory_limit'])} {limits}: memory is at most this multiple of the peak "
        "of 1F1B."
    )


def _made(config: PipelineScheduleConfig, stages: int, microbatches: int) -> Schedule | str:
    """Return the schedule, or, if the config refuses the sizes, the reason as text."""
    try:
        return config.build(stages, microbatches)
    except ConfigError as error:
        return str(error)


def _comparison(entries: Sequence[ScheduleEntry], stages: int, microbatches: int) -> Table:
    columns = ("schedule", "bubble", "flushed", "makespan", "peak", "messages", "least")
    made = table(f"{stages} stages, {microbatches} microbatches", *columns)
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
        made.add_row(entry.label, *figures, least)
    return made
