"""The drawing of a timeline as an SVG picture."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from jaxdist.pipeline_schedules.draw.text import summary
from jaxdist.pipeline_schedules.schedule import Task, TaskKind
from jaxdist.pipeline_schedules.simulate import Timeline

_COLOURS = {
    TaskKind.FORWARD: ("#2a6fb0", "#9cc3e6"),
    TaskKind.FULL: ("#3c8d5a", "#a9d6b8"),
    TaskKind.INPUT: ("#1f8a8a", "#9fd8d8"),
    TaskKind.WEIGHT: ("#8b5fbf", "#cdb8e6"),
}
"""The colors of the first chunk and of the last chunk of a stage, by kind of task."""
_NAMES = {
    TaskKind.FORWARD: "F forward",
    TaskKind.FULL: "B backward",
    TaskKind.INPUT: "I backward, input half",
    TaskKind.WEIGHT: "W backward, weight half",
}
_LEFT, _TOP, _ROW, _GAP = 70, 34, 26, 4
_FONT = 11
_LETTER = 0.62 * _FONT
"""The assumed width of a digit in the label of a box, in pixels."""


def draw_svg(timeline: Timeline, width: int = 1200) -> str:
    """Draw a timeline as an SVG picture, with a row for each stage and a box for each task.

    Time increases to the right. A box has the number of its microbatch, unless the box is too
    narrow. The later chunks of a stage have lighter colors.

    Args:
      timeline: the timeline of a simulated schedule.
      width: the width of the picture, in pixels.

    Returns:
      The text of the SVG file.
    """
    rows = len(timeline.spans)
    height = _TOP + rows * (_ROW + _GAP) + 64
    scale = (width - _LEFT - 16) / (timeline.makespan or 1)
    body = [
        *_boxes(timeline, scale),
        *_axis(timeline, scale, _TOP + rows * (_ROW + _GAP)),
        *_legend(timeline, _TOP + rows * (_ROW + _GAP) + 48),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="{_FONT}">'
    )
    title = _text(_LEFT, 20, summary(timeline), size=13)
    return "\n".join(
        [
            head,
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            title,
            *body,
            "</svg>\n",
        ]
    )


def _boxes(timeline: Timeline, scale: float) -> Iterator[str]:
    shades = _Shades(timeline)
    for stage, row in enumerate(timeline.spans):
        top = _TOP + stage * (_ROW + _GAP)
        whole = timeline.makespan * scale
        yield _text(_LEFT - 8, top + _ROW * 0.65, f"stage {stage}", anchor="end")
        yield f'<rect x="{_LEFT}" y="{top}" width="{whole:.2f}" height="{_ROW}" fill="#eeeeee"/>'
        for span in row:
            left, wide = _LEFT + span.start * scale, (span.end - span.start) * scale
            fill, ink = shades.of(span.task)
            yield (
                f'<rect x="{left:.2f}" y="{top}" width="{wide:.2f}" height="{_ROW}" fill="{fill}" '
                f'stroke="#ffffff" stroke-width="{min(1.0, wide / 8):.2f}">'
                f"<title>{span.task}: {span.start:g} to {span.end:g}</title></rect>"
            )
            number = str(span.task.microbatch)
            if len(number) * _LETTER + 2 <= wide:
                middle = left + wide / 2
                yield _text(middle, top + _ROW * 0.65, number, anchor="middle", ink=ink)


class _Shades:
    """The colors of tasks, which depend on the kind and are lighter for later chunks of a stage."""

    def __init__(self, timeline: Timeline) -> None:
        placement = timeline.schedule.placement
        self.order = [placement[:chunk].count(stage) for chunk, stage in enumerate(placement)]
        self.most = max(self.order, default=0)

    def of(self, task: Task) -> tuple[str, str]:
        """Return the color of a task's box, and the color of the text in the box."""
        part = self.order[task.chunk] / self.most if self.most else 0.0
        dark, light = (_channels(colour) for colour in _COLOURS[task.kind])
        mixed = [round(a + (b - a) * part) for a, b in zip(dark, light, strict=True)]
        return "#" + "".join(
            f"{value:02x}" for value in mixed
        ), "#000000" if part > 0.4 else "#ffffff"


def _channels(colour: str) -> list[int]:
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]


def _axis(timeline: Timeline, scale: float, top: float) -> Iterator[str]:
    """Draw a time axis with at most about ten labels, in steps of 1, 2 or 5 times a power of 10."""
    step = _step(timeline.makespan / 10)
    tick = 0.0
    # With the tolerance, the last tick is drawn although the sum of the steps is rounded.
    while step and tick <= timeline.makespan * (1 + 1e-9):
        left = _LEFT + tick * scale
        yield f'<path d="M{left:.2f} {top}v5" stroke="#666666"/>'
        yield _text(left, top + 18, f"{tick:g}", anchor="middle")
        tick += step


def _step(least: float) -> float:
    if least <= 0:
        return 0.0
    power = 1.0
    while power > least:
        power /= 10
    while power * 10 <= least:
        power *= 10
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))


def _legend(timeline: Timeline, top: float) -> Iterator[str]:
    kinds = {span.task.kind for row in timeline.spans for span in row}
    left = float(_LEFT)
    for kind in TaskKind:
        if kind in kinds:
            fill = _COLOURS[kind][0]
            yield f'<rect x="{left}" y="{top - 10}" width="12" height="12" fill="{fill}"/>'
            yield _text(left + 17, top, _NAMES[kind])
            left += 40 + len(_NAMES[kind]) * _LETTER
    if timeline.schedule.chunks > timeline.schedule.stages:
        yield _text(left, top, "lighter: a later chunk of the stage")


def _text(
    left: float,
    top: float,
    text: str,
    *,
    anchor: str = "start",
    ink: str = "#222222",
    size: int = _FONT,
) -> str:
    return (
        f'<text x="{left:.2f}" y="{top:.2f}" text-anchor="{anchor}" fill="{ink}" '
        f'font-size="{size}">{escape(text)}</text>'
    )
