"""GPipe: all microbatches forward, then all backward."""

from __future__ import annotations

from typing import Literal

from jaxdist.config.schema import Config
from jaxdist.pipeline_schedules.order import RowWriter, refuse_small
from jaxdist.pipeline_schedules.schedule import Schedule, TaskKind


class GPipe(Config):
    """All microbatches forward, then all backward: `gpipe`."""

    type: Literal["gpipe"] = "gpipe"
    """Selects this schedule."""

    def build(self, stages: int, microbatches: int) -> Schedule:
        return gpipe(stages, microbatches)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Return the schedule of all forward passes, then all backward passes.

    The bubble is (stages - 1) (F + B); every stage keeps the activations of all microbatches. The
    source is Huang et al., arXiv 1811.06965.

    Raises:
      ConfigError: no stage, or no microbatch.

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
