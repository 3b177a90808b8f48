"""The schedule 1F1B, which alternates forward and backward tasks."""

from __future__ import annotations

from typing import Literal

from jaxdist.config.schema import Config
from jaxdist.pipeline_schedules.order import RowWriter, refuse_small
from jaxdist.pipeline_schedules.schedule import Schedule, TaskKind


class OneFOneB(Config):
    """The schedule 1F1B, which alternates forward and backward tasks."""

    type: Literal["1f1b"] = "1f1b"
    """The name that selects this schedule in a config."""

    def build(self, stages: int, microbatches: int) -> Schedule:
        return one_f_one_b(stages, microbatches)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Return the schedule 1F1B, in which each stage alternates forward and backward tasks.

    A stage first runs forward tasks until its first gradient arrives. The bubble is (stages - 1) (F
    + B), as with GPipe, where F and B are the times of a forward and a backward task. Stage i keeps
    the activations of min(microbatches, stages - i) microbatches. The source is Narayanan et al.,
    arXiv 2006.09503.

    Raises:
      ConfigError: there is no stage or no microbatch.

    >>> [str(task) for task in one_f_one_b(stages=2, microbatches=3).tasks(0)]
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """
    refuse_small("1f1b", stages, microbatches)
    rows = []
    for stage in range(stages):
        ahead = min(microbatches, stages - stage - 1)
        row = RowWriter()
        row.add((TaskKind.FORWARD, stage), times=ahead)
        row.add((TaskKind.FORWARD, stage), (TaskKind.FULL, stage), times=microbatches - ahead)
        row.add((TaskKind.FULL, stage), times=ahead)
        rows.append(tuple(row.tasks))
    return Schedule("1f1b", microbatches, tuple(range(stages)), tuple(rows))
