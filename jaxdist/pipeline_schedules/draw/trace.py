"""The conversion of a timeline to a Chrome trace, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from jaxdist.pipeline_schedules.schedule import TaskKind
from jaxdist.pipeline_schedules.simulate import Timeline
from jaxdist.types import JsonObject

_NAMES = {
    TaskKind.FORWARD: "forward",
    TaskKind.FULL: "backward",
    TaskKind.INPUT: "backward: input",
    TaskKind.WEIGHT: "backward: weight",
}


def chrome_trace(timeline: Timeline, unit_seconds: float = 1e-3) -> JsonObject:
    """Convert a timeline to a Chrome trace with a thread for each stage and an event for each task.

    Args:
      timeline: the timeline of a simulated schedule.
      unit_seconds: the length of the timeline's unit of time, in seconds. The times in the trace
        are in microseconds.

    >>> from jaxdist.pipeline_schedules.gpipe import gpipe
    >>> from jaxdist.pipeline_schedules.simulate import simulate
    >>> trace = chrome_trace(simulate(gpipe(stages=1, microbatches=1)))
    >>> [(event["name"], event["ts"], event["dur"]) for event in trace["traceEvents"][2:]]
    [('0F0', 0.0, 1000.0), ('0B0', 1000.0, 2000.0)]
    """
    schedule = timeline.schedule
    events: list[JsonObject] = [_named("process_name", 0, f"pipeline {schedule.name}")]
    for stage, row in enumerate(timeline.spans):
        events.append(_named("thread_name", stage, f"stage {stage}"))
        for span in row:
            events.append(
                {
                    "name": str(span.task),
                    "cat": _NAMES[span.task.kind],
                    "ph": "X",
                    "pid": 0,
                    "tid": stage,
                    "ts": span.start * unit_seconds * 1e6,
                    "dur": (span.end - span.start) * unit_seconds * 1e6,
                    "args": {"chunk": span.task.chunk, "microbatch": span.task.microbatch},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(kind: str, thread: int, name: str) -> JsonObject:
    return {"name": kind, "ph": "M", "pid": 0, "tid": thread, "args": {"name": name}}
