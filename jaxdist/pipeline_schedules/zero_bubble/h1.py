"""The handcrafted zero-bubble schedules ZB-H1 and ZB-H2.

The source is Qi et al., arXiv 2401.10241 section 2. F, I and W are the times of a FORWARD, an INPUT
and a WEIGHT task of a stage.
"""

from __future__ import annotations

from typing import Literal

from jaxdist.config.schema import Config
from jaxdist.pipeline_schedules.order import RowWriter, refuse_fewer
from jaxdist.pipeline_schedules.schedule import Schedule, TaskKind


class ZBH1(Config):
    """The zero-bubble schedule ZB-H1, which needs the memory of 1F1B."""

    type: Literal["zb_h1"] = "zb_h1"
    """The name that selects this schedule in a config."""

    def build(self, stages: int, microbatches: int) -> Schedule:
        return zb_h1(stages, microbatches)


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Return the schedule ZB-H1: 1F1B with delayed WEIGHT tasks, and longer delays on later stages.

    Let F, I and W be the times of a FORWARD, an INPUT and a WEIGHT task. The bubble is (stages - 1)
    (F + I - W). If F, I and W are equal, this is a third of the bubble of 1F1B. Every stage keeps
    `stages` activations, as does the first stage of 1F1B.

    Raises:
      ConfigError: there are fewer microbatches than stages.

    >>> [str(task) for task in zb_h1(stages=2, microbatches=2).tasks(1)]
    ['1F0', '1I0', '1F1', '1I1', '1W0', '1W1']
    """
    refuse_fewer("zb_h1", stages, microbatches, stages, "1f1b")
    return _delayed("zb_h1", stages, microbatches, reach=1)


class ZBH2(Config):
    """The zero-bubble schedule ZB-H2, which needs twice the memory of 1F1B."""

    type: Literal["zb_h2"] = "zb_h2"
    """The name that selects this schedule in a config."""

    def build(self, stages: int, microbatches: int) -> Schedule:
        return zb_h2(stages, microbatches)


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """Return the schedule ZB-H2, in which a stage never waits after its first task.

    Each stage begins with enough forward tasks to fill the time until its first gradient arrives.
    Let F, I and W be the times of a FORWARD, an INPUT and a WEIGHT task. The bubble is (stages - 1)
    (F + I - 2 W), which is 0 if F, I and W are equal. Every stage keeps 2 * stages - 1 activations.
    Compared with the first stage, stage i begins and ends each step later by the time of i forward
    tasks (see `Timeline.period`).

    Raises:
      ConfigError: there are fewer than 2 * stages - 1 microbatches.

    >>> [str(task) for task in zb_h2(stages=2, microbatches=3).tasks(1)]
    ['1F0', '1I0', '1F1', '1I1', '1F2', '1I2', '1W0', '1W1', '1W2']
    """
    refuse_fewer("zb_h2", stages, microbatches, 2 * stages - 1, "zb_h1")
    return _delayed("zb_h2", stages, microbatches, reach=2)


def _delayed(name: str, stages: int, microbatches: int, reach: int) -> Schedule:
    """Return a schedule with early forward tasks and delayed WEIGHT tasks.

    Stage i begins with reach * (stages - 1 - i) + 1 forward tasks, and delays WEIGHT tasks by
    reach * i microbatches. Early forward tasks and delayed WEIGHT tasks both keep activations. The
    sum of the two numbers is the same on every stage, and so is the memory.
    """
    rows = []
    for stage in range(stages):
        forward, weight = (TaskKind.FORWARD, stage), (TaskKind.WEIGHT, stage)
        row = RowWriter()
        row.add(forward, times=reach * (stages - 1 - stage) + 1)
        for microbatch in range(microbatches):
            row.add((TaskKind.INPUT, stage))
            if microbatch >= reach * stage:
                row.add(weight)
            if row.count[forward] < microbatches:
                row.add(forward)
        row.add(weight, times=microbatches - row.count[weight])
        rows.append(tuple(row.tasks))
    return Schedule(name, microbatches, tuple(range(stages)), tuple(rows))
