"""The zero-bubble schedules with chunks in a V: ZB-V, V-Half and V-Min.

The first and the last chunk are on the first stage. The source is Qi et al., "Pipeline parallelism
with controllable memory", arXiv 2405.15362. All tasks are assumed to take one unit of time, which
is also the unit of bubbles. A microbatch has six tasks on a stage: F, I and W of two chunks. Each
microbatch repeats the pattern of the previous microbatch six units later. The distances between the
tasks of a microbatch determine the memory. The unit of memory is the activations of a microbatch in
both chunks of a stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from jaxdist.config.schema import Config
from jaxdist.pipeline_schedules.costs import Costs
from jaxdist.pipeline_schedules.order import RowWriter, refuse_fewer, refuse_small
from jaxdist.pipeline_schedules.schedule import Schedule, Task, TaskKind, v_shape
from jaxdist.pipeline_schedules.zero_bubble.fill import Fill

_UNITS = 6
"""The number of tasks of a microbatch on a stage: FORWARD, INPUT and WEIGHT of two chunks."""


class ZBV(Config):
    """The zero-bubble schedule ZB-V, with the chunks in a V."""

    type: Literal["zb_v"] = "zb_v"
    """The name that selects this schedule in a config."""

    def build(self, stages: int, microbatches: int) -> Schedule:
        return zb_v(stages, microbatches)


def zb_v(stages: int, microbatches: int) -> Schedule:
    """Return the schedule ZB-V, which needs the memory of 1F1B and has no bubble.

    The bubble is 0 if all tasks take the same time. Every stage keeps `stages` activations. There
    are twice as many messages as in 1F1B.

    Raises:
      ConfigError: there are fewer than 2 * stages - 1 microbatches.

    >>> [str(task) for task in zb_v(stages=1, microbatches=2).tasks(0)]
    ['0F0', '1F0', '1I0', '1W0', '0F1', '0I0', '0W0', '1F1', '1I1', '1W1', '0I1', '0W1']
    """
    refuse_fewer("zb_v", stages, microbatches, 2 * stages - 1, "v_half")
    rows = tuple(_zb_v_row(stage, stages, microbatches) for stage in range(stages))
    return Schedule("zb_v", microbatches, v_shape(stages), rows)


def _zb_v_row(stage: int, stages: int, microbatches: int) -> tuple[Task, ...]:
    down, up = stage, 2 * stages - 1 - stage
    forward, back = (TaskKind.FORWARD, down), [(TaskKind.INPUT, down), (TaskKind.WEIGHT, down)]
    turn = [(TaskKind.FORWARD, up), (TaskKind.INPUT, up), (TaskKind.WEIGHT, up)]
    row = RowWriter()
    row.add(forward, times=2 * (stages - stage) - 1)
    row.add(turn[0], forward, times=stage)
    row.add(*turn, times=stages - stage)
    row.add(forward, *back, *turn, times=microbatches - 2 * stages + stage + 1)
    row.add(*back, *turn, times=stages - 1 - stage)
    # Near the end, WEIGHT tasks are delayed until no other stage waits for an INPUT task.
    row.add(back[0], turn[1], times=stage)
    row.add(*back, times=stages - stage)
    row.add(turn[2], times=microbatches - row.count[turn[2]])
    row.add(back[1], times=microbatches - row.count[back[1]])
    return tuple(row.tasks)


class _Block(NamedTuple):
    """The distances in time between the tasks of a microbatch.

    A microbatch passes through all stages four times: with F of a stage's first chunk, F of its
    second chunk, I of its second chunk, and I of its first chunk.

    Attributes:
      hops: for each of these four passes, the time from its task on a stage to its task on the next
        stage of the pass.
      turns: for each of the first three passes, the time from its last task to the first task of
        the next pass. Both tasks are on the same stage.
    """

    hops: tuple[int, int, int, int]
    turns: tuple[int, int, int]

    def times(self, stages: int, stage: int) -> tuple[int, int, int, int]:
        """Return the starts of the FORWARD and INPUT tasks of microbatch 0 on a stage, four in all.

        The tasks of microbatch b start 6 b units later.
        """
        last = stages - 1
        found: list[int] = []
        corner = 0
        for way, hop in enumerate(self.hops):
            far = stage if way % 2 == 0 else last - stage
            found.append(corner + hop * far)
            corner += hop * last + (*self.turns, 0)[way]
        first, second, third, fourth = found
        return first, second, third, fourth


class VHalf(Config):
    """The schedule V-Half, which needs half of the memory of 1F1B."""

    type: Literal["v_half"] = "v_half"
    """The name that selects this schedule in a config."""

    def build(self, stages: int, microbatches: int) -> Schedule:
        return v_half(stages, microbatches)


def v_half(stages: int, microbatches: int) -> Schedule:
    """Return the schedule V-Half, which needs half of the memory of 1F1B.

    A stage keeps at most (stages + 1) / 2 activations if the number of stages is odd, and stages /
    2 + 1 if the number is even. With at least 2 * stages microbatches, the bubble is 3 * stages - 4
    or 3 * stages - 5 units, and 2 units on two stages. The bubble of 1F1B is 6 (stages - 1) units.

    Raises:
      ConfigError: there is no stage or no microbatch.
    """
    block = _Block((1, 2, 1, 2), (1, 1, 2) if stages % 2 else (4, 1, 5))
    return _repeat("v_half", stages, microbatches, block)


class VMin(Config):
    """The schedule V-Min, which needs a third of the memory of 1F1B."""

    type: Literal["v_min"] = "v_min"
    """The name that selects this schedule in a config."""

    def build(self, stages: int, microbatches: int) -> Schedule:
        return v_min(stages, microbatches)


def v_min(stages: int, microbatches: int) -> Schedule:
    """Return the schedule V-Min, which needs a third of the memory of 1F1B.

    A stage keeps at most (stages + 4) / 3 activations. With at least 2 * stages microbatches, the
    bubble is 4 * stages - 5 units. The bubble of 1F1B is 6 (stages - 1) units.

    Raises:
      ConfigError: there is no stage or no microbatch.
    """
    block = _Block((1, 1, 1, 1), (1, 1, 1) if stages % 3 else (3, 1, 3))
    return _repeat("v_min", stages, microbatches, block)


def _repeat(name: str, stages: int, microbatches: int, block: _Block) -> Schedule:
    """Return a schedule that repeats a block for each microbatch, without unnecessary waiting.

    Raises:
      ConfigError: there is no stage or no microbatch.
    """
    refuse_small(name, stages, microbatches)
    times = [block.times(stages, stage) for stage in range(stages)]
    orders = [_order(stage, stages, microbatches, times[stage]) for stage in range(stages)]
    limit = max(_peak(row, microbatches) for row in times)
    placement = v_shape(stages)
    runs = (Fill(placement, orders, Costs(), limit, patience) for patience in (1.0, 0.0))
    best = min((run for run in runs if run.rows is not None), key=lambda run: max(run.spent))
    assert best.rows is not None, "what the blocks keep at once is enough to go through them"
    return Schedule(name, microbatches, placement, best.rows)


def _order(stage: int, stages: int, microbatches: int, times: Iterable[int]) -> list[Task]:
    down, up = stage, 2 * stages - 1 - stage
    ways = (
        (TaskKind.FORWARD, down),
        (TaskKind.FORWARD, up),
        (TaskKind.INPUT, up),
        (TaskKind.INPUT, down),
    )
    timed = [
        (_UNITS * microbatch + time, Task(kind, chunk, microbatch))
        for microbatch in range(microbatches)
        for time, (kind, chunk) in zip(times, ways, strict=True)
    ]
    assert len({time for time, _ in timed}) == len(timed), "two tasks of a stage at one time"
    return [task for _, task in sorted(timed)]


def _peak(times: tuple[int, int, int, int], microbatches: int) -> int:
    """Return the maximum of the live activations on a stage if the block is repeated.

    A WEIGHT task runs after its INPUT task, in the first unit that is free in every repetition.

    Args:
      times: the starts of the FORWARD and INPUT tasks of microbatch 0 on the stage.
      microbatches: the number of microbatches.

    Returns:
      The maximum, where a microbatch counts once for each chunk in which it is live.
    """
    taken = {time % _UNITS for time in times}
    changes = [(time, 1) for time in times[:2]]
    for time in times[2:]:
        weight = next(t for t in range(time + 1, time + 1 + _UNITS) if t % _UNITS not in taken)
        taken.add(weight % _UNITS)
        changes.append((weight + 1, -1))
    live = most = 0
    # For the same time, -1 is sorted before 1, because memory is freed before it is used again.
    for _, change in sorted(
        (time + _UNITS * microbatch, change)
        for microbatch in range(microbatches)
        for time, change in changes
    ):
        live += change
        most = max(most, live)
    return most
