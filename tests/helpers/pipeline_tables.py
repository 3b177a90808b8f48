"""Schedules by name, and greedy schedules that no generator of the package returns."""

from jaxdist.pipeline_schedules.derived import eager
from jaxdist.pipeline_schedules.dual_pipe_v import dual_pipe_v
from jaxdist.pipeline_schedules.gpipe import gpipe
from jaxdist.pipeline_schedules.interleaved import breadth_first, interleaved
from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
from jaxdist.pipeline_schedules.order import needs
from jaxdist.pipeline_schedules.schedule import Schedule, Task, TaskKind
from jaxdist.pipeline_schedules.zero_bubble.h1 import zb_h1, zb_h2
from jaxdist.pipeline_schedules.zero_bubble.v import v_half, v_min, zb_v

F, B, I, W = TaskKind.FORWARD, TaskKind.FULL, TaskKind.INPUT, TaskKind.WEIGHT  # noqa: E741  (the letters of CSV)

TABLES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager": lambda p, m: eager(one_f_one_b(p, m)),
    "interleaved": lambda p, m: interleaved(p, m, 2),
    "breadth_first": lambda p, m: breadth_first(p, m, 2),
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "dual_pipe_v": dual_pipe_v,
}


def greedy(name, placement, microbatches, *, split=False, in_flight=4):
    """Return a schedule in which each stage runs any ready task in each tick.

    Backward tasks precede forward tasks, and tasks of weight gradients come last.
    """
    chunks, stages = len(placement), max(placement) + 1
    kinds = (I, F, W) if split else (B, F)
    left = {Task(k, c, m) for k in kinds for c in range(chunks) for m in range(microbatches)}
    done, rows, tick = {}, [[] for _ in range(stages)], 0
    while left:
        for stage, row in enumerate(rows):
            entered = [t.kind for t in row if t.chunk == 0]
            full = entered.count(F) - entered.count(kinds[0]) >= in_flight
            fit = [
                t
                for t in left
                if placement[t.chunk] == stage
                and all(done.get(n, tick) < tick for n in needs(t, chunks) if n.kind in kinds)
                and not (full and t.kind is F and t.chunk == 0)
            ]
            if fit:
                task = min(fit, key=lambda t: (kinds.index(t.kind), t.microbatch, -t.chunk))
                row.append(task)
                done[task] = tick
                left.remove(task)
        tick += 1
    return Schedule(name, microbatches, tuple(placement), tuple(map(tuple, rows)))
