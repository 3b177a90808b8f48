"""`jaxdist pipeline compare`: all schedules on the same stages. No device, and no jax."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from rich.console import Console
from rich.table import Table

from jaxdist.commands.pipelines import ALTERNATIVES, document_of, plain_table, with_costs
from jaxdist.config.schema import Config, validate
from jaxdist.errors import ConfigError
from jaxdist.pipeline_schedules.build import PipelineScheduleConfig
from jaxdist.pipeline_schedules.costs import CostsConfig, Time
from jaxdist.pipeline_schedules.csv_form import Csv
from jaxdist.pipeline_schedules.schedule import Schedule
from jaxdist.pipeline_schedules.simulate import Timeline, simulate

AUTO_MEMORY = (1.0, 2.0)
"""Limits under which `compare` shows schedules that take one."""


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
    common = validate(document_of(overrides), Comparison)
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
    made = _made(with_costs(config, of_chunk), stages, microbatches)
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
    table = plain_table(columns, f"{stages} stages, {microbatches} microbatches")
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
