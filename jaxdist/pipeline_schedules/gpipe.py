"""The schedule GPipe, which runs all forward tasks, then all backward tasks."""

from __future__ import annotations

from typing import Literal

from jaxdist.config.schema import Config
from jaxdist.pipeline_schedules.order import RowWriter, refuse_small
from jaxdist.pipeline_schedules.schedule import Schedule, TaskKind


class GPipe(Config):
    """The schedule GPipe: all forward tasks, then all backward tasks."""

    type: Literal["gpipe"] = "gpipe"
    """The name that selects this schedule in a config."""

    def build(self, stages: int, microbatches: int) -> Schedule:
        return gpipe(stages, microbatches)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Return the schedule GPipe: on each stage all forward tasks, then all backward tasks.

    The bubble is (stages - 1) (F + B), where F and B are the times of a forward and a backward
    task. Every stage keeps the activations of all microbatches. The source is Huang et al., arXiv
    1811.06965.

    Raises:
      ConfigError: there is no stage or no microbatch.

    >>> [str(task) for task in gpipe(stages=2, microbatches=2).tasks(0)]
    ['0F0', '0F1', '0B0', '0B1']
    """
    refuse_small("gpipe", stages, microbatches)
    rows = []
    for stage in range(stages):
        row = RowWriter()
        row.add((TaskKind.FORWARD, stage), times=microbatches)
        row.add((TaskKind.FULL, stage), times=microbatches)
        rows.append(tuple(row.tasks))
    return Schedule("gpipe", microbatches, tuple(range(stages)), tuple(rows))
