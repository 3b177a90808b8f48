"""The drawing of a timeline as text for a terminal."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import gcd

from jaxdist.pipeline_schedules.schedule import Task, TaskKind
from jaxdist.pipeline_schedules.simulate import Span, Timeline

_COLOURS = {
    TaskKind.FORWARD: "44",
    TaskKind.FULL: "42",
    TaskKind.INPUT: "46",
    TaskKind.WEIGHT: "45",
}
"""The codes of the background colors in a terminal, by kind of task."""


def draw_text(timeline: Timeline, columns: int = 80, *, colour: bool = False) -> str:
    """Draw a timeline as text, with a line for each stage, a line about the scale, and a summary.

    Time increases to the right. If the text fits into the columns, a task is drawn as its kind and
    microbatch, with its chunk if a stage has several chunks. Otherwise each character is a unit of
    time: the letter of a task (F, B, I or W), or a dot if the stage waits. Characters beyond the
    columns are cut off, and the line about the scale reports this. If the times have no common
    unit, the columns are equal parts of the makespan, and a character shows the task that runs in
    the middle of a part.

    Args:
      timeline: the timeline of a simulated schedule.
      columns: the width of the terminal, in characters; a width below 40 counts as 40.
      colour: whether to color backgrounds by kind of task, with ANSI escapes.

    >>> from jaxdist.pipeline_schedules.gpipe import gpipe
    >>> from jaxdist.pipeline_schedules.simulate import simulate
    >>> print(draw_text(simulate(gpipe(stages=2, microbatches=2))))
    stage 0 |F0 F1 .  .  .  B0    B1    |
    stage 1 |.  F0 F1 B0    B1    .  .  |
    3 characters are 1 of 9 units of time
    gpipe: 2 stages, 2 microbatches; bubble 3 of 9 (33.3%); at most 2 activations; 4 messages
    """
    margin = len(f"stage {len(timeline.spans) - 1} ||")
    room = max(columns, 40) - margin
    unit = _unit(timeline)
    cells = round(timeline.makespan / unit) if unit else room
    label = _labels(timeline)
    wide = 1 + max((len(label(span.task)) for row in timeline.spans for span in row), default=0)
    if not unit or cells * wide > room:
        label, wide = _letter, 1
    unit = unit or timeline.makespan / room
    shown = min(cells, room)
    lines = [
        f"{f'stage {stage}':<{margin - 2}}|{_line(row, shown, unit, wide, label, colour)}|"
        for stage, row in enumerate(timeline.spans)
    ]
    one = "1 character is" if wide == 1 else f"{wide} characters are"
    note = f"{one} {unit:.4g} of {timeline.makespan:.4g} units of time"
    if shown < cells:
        note += (
            f"; cut off at {shown * unit:.4g}: {cells + margin} columns would show the whole "
            "schedule"
        )
    return "\n".join([*lines, note, summary(timeline)])


def summary(timeline: Timeline) -> str:
    """Describe a timeline in one line: its sizes, bubble, peak of activations and messages."""
    schedule = timeline.schedule
    chunks = "" if schedule.chunks == schedule.stages else f", {schedule.chunks} chunks"
    return (
        f"{schedule.name}: {schedule.stages} stages{chunks}, {schedule.microbatches} microbatches; "
        f"bubble {timeline.bubble:.4g} of {timeline.period:.4g} ({timeline.bubble_fraction:.1%}); "
        f"at most {timeline.peak:.4g} activations; {timeline.messages} messages"
    )


def _unit(timeline: Timeline) -> float:
    """Return the greatest common divisor of all starts and ends, or 0 if not all are integers."""
    times = {time for row in timeline.spans for span in row for time in span[:2]}
    if any(time != int(time) for time in times):
        return 0.0
    return float(reduce(gcd, map(int, times), 0))


def _labels(timeline: Timeline) -> Callable[[Task], str]:
    if timeline.schedule.chunks == timeline.schedule.stages:
        return lambda task: f"{task.kind}{task.microbatch}"
    return str


def _letter(task: Task) -> str:
    return str(task.kind)


def _line(
    row: tuple[Span, ...],
    cells: int,
    unit: float,
    wide: int,
    label: Callable[[Task], str],
    colour: bool,
) -> str:
    """Draw the line of a stage, in which each cell has the task that runs in the cell's middle.

    Args:
      row: the tasks of the stage.
      cells: the number of cells.
      unit: the time of a cell.
      wide: the width of a cell, in characters. With a width of more than 1, only the first cell of
        a task has the label.
      label: the function from a task to its label.
      colour: whether to color the cells.
    """
    parts: list[str] = []
    spans = iter(row)
    span, shown = next(spans, None), None
    for cell in range(cells):
        middle = (cell + 0.5) * unit
        while span is not None and span.end <= middle:
            span = next(spans, None)
        if span is None or span.start > middle:
            parts.append(".".ljust(wide))
            continue
        text = label(span.task) if wide == 1 or span is not shown else ""
        shown = span
        filled = text.ljust(wide)
        parts.append(f"\x1b[{_COLOURS[span.task.kind]}m{filled}\x1b[0m" if colour else filled)
    return "".join(parts)
