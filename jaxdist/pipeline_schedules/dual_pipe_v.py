"""The schedule DualPipeV, which pairs forward tasks with backward tasks of other microbatches."""

from __future__ import annotations

from collections import deque
from typing import Literal

from jaxdist.config.schema import Config
from jaxdist.pipeline_schedules.order import refuse_fewer
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
    rows = tuple(_Writer(stage, stages).row(microbatches) for stage in range(stages))
    return Schedule("dual_pipe_v", microbatches, v_shape(stages), rows)


class _Writer:
    """A writer of the tasks of a stage, which keeps delayed weight tasks in a queue."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage, self.stages = stage, stages
        self.down, self.up = stage, 2 * stages - 1 - stage
        self.tasks: list[Task] = []
        self.owed: deque[Task] = deque()
        self.count = {(way, chunk): 0 for way in (False, True) for chunk in (self.down, self.up)}

    def row(self, microbatches: int) -> tuple[Task, ...]:
        # The loops here and in `_drain` are the eight steps of DeepSeek's `DualPipeV`, with the
        # same numbers of iterations.
        after = self.stages - 1 - self.stage
        for _ in range(2 * after):
            self._forward(self.down)
        for _ in range(self.stage + 1):
            self._forward(self.down)
            self._forward(self.up)
        for _ in range(after):
            self._back(self.up, split=True)
            self._weight()
            self._forward(self.up)
        for _ in range(microbatches - 2 * self.stages + self.stage + 1):
            self._forward(self.down)
            self._back(self.up)
            self._forward(self.up)
            self._back(self.down)
        for _ in range(after):
            self._back(self.up)
            self._forward(self.up)
            self._back(self.down)
        self._drain(after)
        return tuple(self.tasks)

    def _drain(self, after: int) -> None:
        """Write the backward tasks of the last microbatches.

        The later backward tasks are split into INPUT and WEIGHT tasks.
        """
        left = 2 * (self.stage + 1)
        for number in range(left):
            self._back(self.down if number % 2 else self.up, split=number > self.stage)
        for _ in range(after):
            self._weight()
            self._back(self.down, split=True)
        while self.owed:
            self._weight()

    def _next(self, back: bool, chunk: int) -> int:
        self.count[back, chunk] += 1
        return self.count[back, chunk] - 1

    def _forward(self, chunk: int) -> None:
        self.tasks.append(Task(TaskKind.FORWARD, chunk, self._next(False, chunk)))

    def _back(self, chunk: int, *, split: bool = False) -> None:
        microbatch = self._next(True, chunk)
        self.tasks.append(Task(TaskKind.INPUT if split else TaskKind.FULL, chunk, microbatch))
        if split:
            self.owed.append(Task(TaskKind.WEIGHT, chunk, microbatch))

    def _weight(self) -> None:
        self.tasks.append(self.owed.popleft())
