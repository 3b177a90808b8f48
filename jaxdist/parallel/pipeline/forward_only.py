"""Forward passes alone, for evaluation, over chunks wherever training laid them."""

from __future__ import annotations

from collections.abc import Sequence

from jaxdist.parallel.pipeline.rows import refuse_small
from jaxdist.parallel.pipeline.schedule import Kind, Schedule, Slot, Task


def forward_only(placement: Sequence[int], microbatches: int) -> Schedule:
    """Every microbatch once through all chunks; a stage takes what is furthest on its way first.

    Args:
      placement: the stage of each chunk: that of the schedule the model is trained with.

    With one chunk per stage the bubble is (stages - 1) F.

    Raises:
      ConfigError: no chunk, or no microbatch.

    >>> [str(task) for task in forward_only((0, 1, 1, 0), microbatches=2).tasks(0)]
    ['0F0', '0F1', '3F0', '3F1']
    """
    stages = max(placement, default=-1) + 1
    refuse_small("forward_only", stages, microbatches)
    chunks = len(placement)
    mine = [[c for c in reversed(range(chunks)) if placement[c] == s] for s in range(stages)]
    done = [0] * chunks
    rows: list[list[Slot]] = [[] for _ in range(stages)]
    while done[-1] < microbatches:
        # All stages see the same moment: what is done in this tick arrives with the next one.
        before = [microbatches, *done]
        for stage, held in enumerate(mine):
            chunk = next((c for c in held if done[c] < before[c]), None)
            if chunk is not None:
                rows[stage].append(Task(Kind.FORWARD, chunk, done[chunk]))
                done[chunk] += 1
    return Schedule("forward_only", microbatches, tuple(placement), tuple(map(tuple, rows)))
