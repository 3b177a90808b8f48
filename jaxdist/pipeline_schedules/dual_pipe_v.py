"""The schedule DualPipeV, which pairs forward tasks with backward tasks of other microbatches."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Literal

from jaxdist.config.schema import Config
from jaxdist.pipeline_schedules.order import RowWriter, refuse_fewer
from jaxdist.pipeline_schedules.schedule import Schedule, Task, TaskKind, v_shape


class DualPipeV(Config):
    """The schedule DualPipeV: pairs of forward and backward tasks, with chunks in a V."""

    type: Literal["dual_pipe_v"] = "dual_pipe_v"
    """The name that selects this schedule in a config."""

    def build(self, stages: int, microbatches: int) -> Schedule:
        return dual_pipe_v(stages, microbatches)


def dual_pipe_v(stages: int, microbatches: int) -> Schedule:
    """Return the schedule DualPipeV: one half of DualPipe, with the chunks in a V.

    A stage stores its parameters once, instead of twice as in DualPipe. In the middle of a row,
    every FORWARD task comes directly before a FULL task of the stage's other chunk. The messages of
    each of these two tasks can overlap with the computation of the other task.

    Let the times F, I and W of FORWARD, INPUT and WEIGHT tasks be equal, and let B = I + W. If such
    a pair is a single task with the time F&B, and its results are sent when it ends, the bubble is
    (stages - 1) (F&B + B - 3 W). If the forward result is sent as soon as it is computed, as in
    `simulate`, the bubble is (stages - 1) W. Every stage keeps 2 * stages + 1 activations of a
    chunk. The sources are DeepSeek-V3, arXiv 2412.19437 section 3.2.1, and
    github.com/deepseek-ai/DualPipe for the V form.

    Raises:
      ConfigError: there are fewer than 2 * stages microbatches.

    >>> [str(task) for task in dual_pipe_v(stages=1, microbatches=2).tasks(0)]
    ['0F0', '1F0', '0F1', '1B0', '1F1', '0B0', '1B1', '0I1', '0W1']
    """
    refuse_fewer("dual_pipe_v", stages, microbatches, 2 * stages, "v_half")
    rows = tuple(_row(stage, stages, microbatches) for stage in range(stages))
    return Schedule("dual_pipe_v", microbatches, v_shape(stages), rows)


def _row(stage: int, stages: int, microbatches: int) -> tuple[Task, ...]:
    row, owed = RowWriter(), deque[Task]()
    down, up, after = stage, 2 * stages - 1 - stage, stages - 1 - stage
    (forward_down, back_down), (forward_up, back_up) = (
        [(kind, chunk) for kind in (TaskKind.FORWARD, TaskKind.FULL)] for chunk in (down, up)
    )

    def split(chunk: int) -> None:
        row.add((TaskKind.INPUT, chunk))
        owed.append(replace(row.tasks[-1], kind=TaskKind.WEIGHT))

    # These are the eight steps of DeepSeek's `DualPipeV`, with the same numbers of iterations.
    row.add(forward_down, times=2 * after)
    row.add(forward_down, forward_up, times=stage + 1)
    for _ in range(after):
        split(up)
        row.tasks.append(owed.popleft())
        row.add(forward_up)
    middle = microbatches - 2 * stages + stage + 1
    row.add(forward_down, back_up, forward_up, back_down, times=middle)
    row.add(back_up, forward_up, back_down, times=after)
    for number in range(2 * (stage + 1)):
        if number > stage:
            split(down if number % 2 else up)
        else:
            row.add(back_down if number % 2 else back_up)
    for _ in range(after):
        row.tasks.append(owed.popleft())
        split(down)
    return (*row.tasks, *owed)
