"""The schedules with several chunks per stage: interleaved 1F1B and breadth-first GPipe.

The bubble is divided by the number of chunks per stage, and the number of messages is multiplied by
about the same number.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jaxdist.config.schema import Config
from jaxdist.errors import ConfigError
from jaxdist.pipeline_schedules.order import RowWriter, refuse_fewer
from jaxdist.pipeline_schedules.schedule import Schedule, Task, TaskKind, loop


class Interleaved(Config):
    """The schedule interleaved 1F1B, with several chunks per stage."""

    type: Literal["interleaved"] = "interleaved"
    """The name that selects this schedule in a config."""
    chunks: Annotated[int, Field(ge=2, le=1024)]
    """The number of chunks of the model on each stage."""

    def build(self, stages: int, microbatches: int) -> Schedule:
        return interleaved(stages, microbatches, self.chunks)


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Return the schedule interleaved 1F1B, with `chunks` chunks per stage.

    A stage runs its chunks in turn, each for a round of `stages` microbatches (depth first). The
    bubble is (stages - 1) (F + B) / chunks, where F and B are the times of all chunks of a stage.
    The first stage keeps stages + (stages - 1) / chunks activations, but no more than there are
    microbatches. The source is Narayanan et al., arXiv 2104.04473 section 2.2.

    Raises:
      ConfigError: there are fewer than 2 chunks per stage, or the number of microbatches is not a
        multiple of the number of stages.

    >>> schedule = interleaved(stages=2, microbatches=2, chunks=2)
    >>> [str(task) for task in schedule.tasks(1)]
    ['1F0', '1F1', '3F0', '3B0', '3F1', '3B1', '1B0', '1B1']
    """
    _refuse_few_chunks("interleaved", chunks)
    refuse_fewer("interleaved", stages, microbatches, stages, "1f1b")
    if microbatches % stages:
        below = microbatches - microbatches % stages
        raise ConfigError(
            f"schedule interleaved: {microbatches} microbatches are not a multiple of {stages} "
            f"stages: use {below} or {below + stages}, or breadth_first"
        )
    rows = []
    for stage in range(stages):
        forward = _rounds(TaskKind.FORWARD, stage, stages, microbatches, chunks)
        backward = _rounds(TaskKind.FULL, stage, stages, microbatches, chunks)
        # Before its first backward task, a stage runs one round of forward tasks for every chunk
        # except the last. It then runs two more forward tasks for each later stage, because an
        # activation needs one tick to reach each later stage, and its gradient needs one tick to
        # return.
        ahead = min((chunks - 1) * stages + 2 * (stages - stage - 1), len(forward))
        row = forward[:ahead]
        # `zip` stops at the last forward task. The remaining backward tasks follow at the end of
        # the row.
        for pair in zip(forward[ahead:], backward, strict=False):
            row.extend(pair)
        rows.append((*row, *backward[len(forward) - ahead :]))
    return Schedule("interleaved", microbatches, loop(stages, stages * chunks), tuple(rows))


def _rounds(kind: TaskKind, stage: int, stages: int, microbatches: int, chunks: int) -> list[Task]:
    """Return a stage's tasks of one kind, ordered by round, then by chunk, then by microbatch."""
    turns = range(chunks) if kind is TaskKind.FORWARD else reversed(range(chunks))
    order = [turn * stages + stage for turn in turns]
    return [
        Task(kind, chunk, microbatch)
        for first in range(0, microbatches, stages)
        for chunk in order
        for microbatch in range(first, first + stages)
    ]


class BreadthFirst(Config):
    """The schedule breadth-first GPipe, with several chunks per stage."""

    type: Literal["breadth_first"] = "breadth_first"
    """The name that selects this schedule in a config."""
    chunks: Annotated[int, Field(ge=2, le=1024)]
    """The number of chunks of the model on each stage."""

    def build(self, stages: int, microbatches: int) -> Schedule:
        return breadth_first(stages, microbatches, self.chunks)


def breadth_first(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Return the schedule breadth-first GPipe, with `chunks` chunks per stage.

    A stage runs all microbatches through one chunk before it begins the next chunk. The bubble is
    the same as for `interleaved`. Every stage keeps the activations of all microbatches. But each
    pass uses the weights of a chunk without interruption. The weights can therefore be gathered
    once per pass, and their gradients can be reduced once per step. The source is Lamy-Poirier,
    arXiv 2211.05953.

    Raises:
      ConfigError: there are fewer than 2 chunks per stage, or fewer microbatches than stages.

    >>> schedule = breadth_first(stages=2, microbatches=2, chunks=2)
    >>> [str(task) for task in schedule.tasks(1)]
    ['1F0', '1F1', '3F0', '3F1', '3B0', '3B1', '1B0', '1B1']
    """
    _refuse_few_chunks("breadth_first", chunks)
    refuse_fewer("breadth_first", stages, microbatches, stages, "gpipe")
    rows = []
    for stage in range(stages):
        row = RowWriter()
        order = [turn * stages + stage for turn in range(chunks)]
        for chunk in order:
            row.add((TaskKind.FORWARD, chunk), times=microbatches)
        for chunk in reversed(order):
            row.add((TaskKind.FULL, chunk), times=microbatches)
        rows.append(tuple(row.tasks))
    return Schedule("breadth_first", microbatches, loop(stages, stages * chunks), tuple(rows))


def _refuse_few_chunks(name: str, chunks: int) -> None:
    if chunks < 2:
        raise ConfigError(
            f"schedule {name}: {chunks} chunks per stage: use at least 2, or use schedule "
            f"{'1f1b' if name == 'interleaved' else 'gpipe'}, which has a single chunk per stage"
        )
