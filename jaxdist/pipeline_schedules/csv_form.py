"""Schedules as CSV files in the form of torch.distributed.pipelining.

A file has a row for each stage and a cell for each task. A cell has the chunk, the kind and the
microbatch, such as `0F0`, `1I3`, `1W3` or `2B5` (FORWARD, INPUT, WEIGHT, FULL). An empty cell is a
unit of waiting. `(0F4;7B1)OVERLAP_F_B` has two tasks that run together; these are read as two tasks
in sequence. Cells for communication (`1SEND_F0`, `1RECV_B0`, `0UNSHARD`, `0RESHARD`,
`0REDUCE_GRAD`, and `WAIT_` before any of these) are ignored, because the messages follow from the
tasks. PyTorch's 1F1B schedule counts the forward tasks of the last stage from 1 but the backward
tasks from 0. A chunk whose forward tasks are counted from 1 in this manner is read as if they were
counted from 0.
"""

from __future__ import annotations

import csv
import io
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from jaxdist.config.files import read_regular, why_unread
from jaxdist.config.schema import Config
from jaxdist.errors import ConfigError
from jaxdist.pipeline_schedules.check import check_schedule, missing_task
from jaxdist.pipeline_schedules.schedule import Schedule, Slot, Task, TaskKind

_TASK = re.compile(r"(\d{1,9})([FIWB])(\d{1,9})")
_TOGETHER = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(
    r"\d+(WAIT_)?(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*"
)


class Csv(Config):
    """A schedule that is read from a CSV file (`read_csv`)."""

    type: Literal["csv"] = "csv"
    """The name that selects this schedule in a config."""
    path: Annotated[str, Field(min_length=1)]
    """The path of the CSV file, which has a row for each stage."""

    def build(self, stages: int, microbatches: int) -> Schedule:
        schedule = read_csv(self.path)
        for what, wanted, have in (
            ("stages", stages, schedule.stages),
            ("microbatches", microbatches, schedule.microbatches),
        ):
            if wanted != have:
                raise ConfigError(
                    f"schedule {self.path}: the file has {have} {what}, but the run has {wanted}: "
                    "change the file or the settings of the run"
                )
        return schedule


def read_csv(path: str | os.PathLike[str]) -> Schedule:
    """Read a schedule from a CSV file.

    The numbers of stages, chunks and microbatches follow from the file.

    Raises:
      ConfigError: the file cannot be read, a stage would wait forever, a cell is not a task, a task
        is missing or occurs twice, or a chunk is on two stages. A message about a cell names its
        row, column and value.
    """
    try:
        # Some spreadsheet programs begin a file with a byte order mark, which `-sig` drops.
        text = read_regular(path).decode("utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"schedule {path}: the file cannot be read ({why_unread(error)}): name a CSV file with "
            "one row per stage"
        ) from None
    return parse_csv(text, name=os.fspath(path))


def write_csv(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write a schedule as a CSV file, which `read_csv` and PyTorch can read."""
    Path(path).write_text(format_csv(schedule), encoding="utf-8")


def format_csv(schedule: Schedule) -> str:
    r"""Return a schedule as CSV text.

    >>> from jaxdist.pipeline_schedules.gpipe import gpipe
    >>> format_csv(gpipe(stages=2, microbatches=1))
    '0F0,0B0\n1F0,1B0\n'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in schedule.rows:
        writer.writerow("" if task is None else str(task) for task in row)
    return text.getvalue()


class _Cell(NamedTuple):
    """A cell of a file: its row and its column, counted from 1, and a task or None for waiting."""

    row: int
    column: int
    task: Slot

    @property
    def where(self) -> str:
        return f"row {self.row}, column {self.column}"


def parse_csv(text: str, name: str = "csv") -> Schedule:
    r"""Return the schedule of a CSV text, as `read_csv` does.

    Args:
      text: the CSV text.
      name: the name of the schedule, which is also in error messages.

    Raises:
      ConfigError: the text is not a complete and valid schedule.

    >>> schedule = parse_csv("0F0,,,0B0\n,1F0,1B0\n")
    >>> schedule.stages, schedule.microbatches, str(schedule.rows[1][1])
    (2, 1, '1F0')
    """
    lines = [row for row in csv.reader(io.StringIO(text)) if row]
    cells = _counted_from_0(
        [_cells(name, number, line) for number, line in enumerate(lines, start=1)]
    )
    tasks = [cell.task for row in cells for cell in row if cell.task is not None]
    if not tasks:
        raise ConfigError(
            f"schedule {name}: the file has no tasks: write one row per stage, with cells such as "
            "0F0"
        )
    placement = _placement(name, cells, max(task.chunk for task in tasks) + 1)
    _refuse_repeated(name, cells)
    schedule = Schedule(
        name=name,
        microbatches=max(task.microbatch for task in tasks) + 1,
        placement=placement,
        rows=tuple(tuple(cell.task for cell in row) for row in cells),
    )
    missing = missing_task(schedule)
    if missing:
        stage, task, microbatch = missing
        raise ConfigError(
            f"schedule {name}: row {stage + 1} lacks {task}: each chunk needs all microbatches, 0 "
            f"to {schedule.microbatches - 1}: add {task}, or remove microbatch {microbatch} from "
            "all rows"
        )
    check_schedule(schedule)
    return schedule


def _cells(name: str, row: int, line: list[str]) -> list[_Cell]:
    found = []
    for column, value in enumerate(line, start=1):
        text = value.strip()
        together = _TOGETHER.fullmatch(text)
        parts = together.group(1).split(";") if together else [text]
        for part in parts:
            if _COMMUNICATION.fullmatch(part.strip()):
                continue
            match = _TASK.fullmatch(part.strip())
            if part.strip() and not match:
                raise ConfigError(
                    f"schedule {name}: row {row}, column {column}: {value!r} is not a task: write "
                    "the chunk, one of F, B, I, W, and the microbatch, such as 0F0, or leave the "
                    "cell empty"
                )
            task = Task(TaskKind(match[2]), int(match[1]), int(match[3])) if match else None
            found.append(_Cell(row, column, task))
    return found


def _counted_from_0(cells: list[list[_Cell]]) -> list[list[_Cell]]:
    """Renumber the forward tasks of chunks whose forward tasks are counted from 1.

    A chunk is renumbered only if its backward tasks are counted from 0 (the 1F1B of PyTorch).
    """
    forward: dict[int, set[int]] = {}
    backward: dict[int, set[int]] = {}
    for task in (cell.task for row in cells for cell in row if cell.task is not None):
        numbers = forward if task.kind is TaskKind.FORWARD else backward
        numbers.setdefault(task.chunk, set()).add(task.microbatch)

    def lowered(task: Slot) -> Slot:
        if task is None or task.kind is not TaskKind.FORWARD:
            return task
        shifted = {number + 1 for number in backward.get(task.chunk, ())}
        if forward[task.chunk] != shifted:
            return task
        return replace(task, microbatch=task.microbatch - 1)

    return [[cell._replace(task=lowered(cell.task)) for cell in row] for row in cells]


def _placement(name: str, cells: list[list[_Cell]], chunks: int) -> tuple[int, ...]:
    """Return the stage of each chunk, which is the index of the row with the chunk's tasks.

    Raises:
      ConfigError: the tasks of a chunk are in two rows, or a chunk has no task.
    """
    first: dict[int, _Cell] = {}
    for row in cells:
        for cell in row:
            if cell.task is None:
                continue
            home = first.setdefault(cell.task.chunk, cell)
            if home.row != cell.row:
                raise ConfigError(
                    f"schedule {name}: {cell.where}: {cell.task}: chunk {cell.task.chunk} is on "
                    f"row {home.row} ({home.task} in column {home.column}), but a chunk belongs to "
                    f"a single stage: move the task to row {home.row}"
                )
    for chunk in range(chunks):
        if chunk not in first:
            raise ConfigError(
                f"schedule {name}: chunk {chunk} has no task, but chunk {chunks - 1} has: number "
                f"the chunks 0 to {len(first) - 1}, in the order in which activations pass them"
            )
    return tuple(first[chunk].row - 1 for chunk in range(chunks))


def _refuse_repeated(name: str, cells: list[list[_Cell]]) -> None:
    seen: dict[Task, _Cell] = {}
    for cell in (cell for row in cells for cell in row):
        if cell.task is None:
            continue
        before = seen.setdefault(cell.task, cell)
        if before is not cell:
            raise ConfigError(
                f"schedule {name}: {cell.where}: {cell.task} repeats {before.where}: remove the "
                "task from either cell"
            )
