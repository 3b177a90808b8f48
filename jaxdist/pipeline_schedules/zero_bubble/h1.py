"""Handcrafted zero-bubble schedules: weight halves of the backward pass fill the waiting times.

The source is Qi et al., arXiv 2401.10241 section 2. F, I and W are the times of the forward pass
and of the two halves of the backward pass of a stage.
"""

from __future__ import annotations

from typing import Literal

from jaxdist.config.schema import Config
from jaxdist.pipeline_schedules.order import RowWriter, refuse_fewer
from jaxdist.pipeline_schedules.schedule import Schedule, TaskKind


class ZBH1(Config):
    """Zero bubble in the memory of 1F1B: `zb_h1`."""

    type: Literal["zb_h1"] = "zb_h1"
    """Selects this schedule."""

    def build(self, stages: int, microbatches: int) -> Schedule:
        return zb_h1(stages, microbatches)


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Return 1F1B with weight halves delayed, by more on later stages.

    The bubble is (stages - 1) (F + I - W), a third of 1F1B's if F, I and W are equal. Every stage
    keeps `stages` activations, as 1F1B's first stage does.

    Raises:
      ConfigError: fewer microbatches than stages.

    >>> [str(task) for task in zb_h1(stages=2, microbatches=2).tasks(1)]
    ['1F0', '1I0', '1F1', '1I1', '1W0', '1W1']
    """
    refuse_fewer("zb_h1", stages, microbatches, stages, "1f1b")
    return _delayed("zb_h1", stages, microbatches, reach=1)


class ZBH2(Config):
    """Zero bubble in twice the memory of 1F1B: `zb_h2`."""

    type: Literal["zb_h2"] = "zb_h2"
    """Selects this schedule."""

    def build(self, stages: int, microbatches: int) -> Schedule:
        return zb_h2(stages, microbatches)


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """Return a schedule whose forward passes begin so early that a started stage never waits.

    The bubble is (stages - 1) (F + I - 2 W), and 0 if F, I and W are equal. Every stage keeps (2
    stages) - 1 activations. Stage i begins and ends a step i forward passes after the first stage
    (see `Timeline.period`).

    Raises:
      ConfigError: fewer than 2 stages - 1 microbatches.

    >>> [str(task) for task in zb_h2(stages=2, microbatches=3).tasks(1)]
    ['1F0', '1I0', '1F1', '1I1', '1F2', '1I2', '1W0', '1W1', '1W2']
    """
    refuse_fewer("zb_h2", stages, microbatches, 2 * stages - 1, "zb_h1")
    return _delayed("zb_h2", stages, microbatches, reach=2)


def _delayed(name: str, stages: int, microbatches: int, reach: int) -> Schedule:
    """Begin stage i with reach * (stages - 1 - i) + 1 forwards; delay reach * i weight halves.

    Forward passes and delayed weight halves both hold activations: the sum of the two numbers is
    the same on every stage.
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
