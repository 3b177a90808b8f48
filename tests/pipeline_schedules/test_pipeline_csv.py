"""The CSV form: what is written is read back; what is wrong is named by row, column and value."""

import os
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxdist.errors import ConfigError
from jaxdist.pipeline_schedules.costs import Costs
from jaxdist.pipeline_schedules.csv_form import format_csv, parse_csv, read_csv, write_csv
from jaxdist.pipeline_schedules.dual_pipe_v import dual_pipe_v
from jaxdist.pipeline_schedules.gpipe import gpipe
from jaxdist.pipeline_schedules.interleaved import interleaved
from jaxdist.pipeline_schedules.schedule import Schedule, Task, TaskKind
from jaxdist.pipeline_schedules.simulate import simulate
from jaxdist.pipeline_schedules.zero_bubble.h1 import zb_h1
from jaxdist.pipeline_schedules.zero_bubble.v import v_min


def in_ticks(schedule: Schedule) -> Schedule:
    """The schedule with None for each unit of time in which a stage waits; each task takes one."""
    # Every task takes one unit. By default a FULL task would take the sum of its two halves.
    timeline = simulate(schedule, Costs(full=1.0))
    rows: list = []
    for spans in timeline.spans:
        row: list = [None] * int(timeline.makespan)
        for span in spans:
            row[int(span.start)] = span.task
        rows.append(tuple(row))
    return replace(schedule, rows=tuple(rows))


@pytest.mark.parametrize(
    "made",
    [gpipe(3, 5), interleaved(2, 4, 2), zb_h1(3, 12), v_min(4, 5), in_ticks(dual_pipe_v(2, 4))],
)
def test_round_trip(made, tmp_path):
    path = tmp_path / "schedule.csv"
    write_csv(made, path)
    found = read_csv(path)
    assert (found.rows, found.placement) == (made.rows, made.placement)
    assert (found.microbatches, found.name) == (made.microbatches, str(path))


def test_ticks_are_a_time_line():
    assert format_csv(in_ticks(gpipe(2, 2))) == "0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1,\n"


def test_spaces_line_ends_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "windows.csv"
    path.write_bytes("\ufeff0F0 , ,0B0\r\n,1F0, 1B0\r\n\r\n".encode())
    assert [len(row) for row in read_csv(path).rows] == [3, 3]


def test_pairs_and_messages_of_torch():
    found = parse_csv(
        "0UNSHARD,0F0,(0F1;1B0)OVERLAP_F_B,(1F1;0B0)OVERLAP_F_B,1B1,0B1,0REDUCE_GRAD\n".replace(
            "0F0,", "0F0,1F0,"
        )
    )
    assert [str(task) for task in found.rows[0]] == [
        "0F0", "1F0", "0F1", "1B0", "1F1", "0B0", "1B1", "0B1",
    ]  # fmt: skip
    found = parse_csv("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert [len(row) for row in found.rows] == [2, 2]


RIGHT = [["0F0", "0F1", "", "0B0", "0B1"], ["", "1F0", "1B0", "1F1", "1B1"]]


def text(*changes):
    """The right table with cells changed: (row, column, value), counted from 1."""
    table = [list(row) for row in RIGHT]
    for row, column, value in changes:
        table[row - 1][column - 1] = value
    return "\n".join(",".join(row) for row in table) + "\n"


WRONG = {
    "not a task": (text((2, 3, "1X0")), r"row 2, column 3: '1X0' is not a task: .* as 0F0"),
    "half a task": (text((1, 1, "F0")), r"row 1, column 1: 'F0' is not a task"),
    "negative": (text((1, 1, "-0F0")), r"row 1, column 1: '-0F0' is not a task"),
    "too large": (text((1, 1, "0F" + "9" * 30)), r"row 1, column 1: '0F9+' is not a task"),
    "bad pair": (text((1, 1, "(0F0;q)OVERLAP_F_B")), r"row 1, column 1: '\(0F0;q\)OVERLAP_F_B'"),
    "missing": (text((2, 4, "")), r"row 2 lacks 1F1: .* all microbatches, 0 to 1: add 1F1, or"),
    "missing half": (text((2, 3, "1I0")), r"row 2 lacks 1W0: .* remove microbatch 0"),
    "twice": (text((1, 3, "0F1")), r"row 1, column 3: 0F1 repeats row 1, column 2"),
    "two rows": (
        text((2, 1, "0F0")),
        r"row 2, column 1: 0F0: chunk 0 is on row 1 \(0F0 in column 1\).*: move the task to row 1",
    ),
    "no such chunk": (
        text().replace("1F", "2F").replace("1B", "2B"),
        r"chunk 1 has no task, but chunk 2 has: number the chunks 0 to 1",
    ),
    "deadlock": (
        text((2, 2, "1B0"), (2, 3, "1F0")),
        r"stage 1, position 1: 1B0 needs 1F0, which comes after it, at position 2: swap the two",
    ),
    "empty": ("\n\n", r"the file has no tasks: write one row per stage"),
    "idle row": (text() + ",,\n", r"stage 2 of 3 holds no chunk"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case):
    table, message = WRONG[case]
    with pytest.raises(ConfigError, match=rf"schedule mine\.csv: {message}"):
        parse_csv(table, name="mine.csv")


TORCH = {
    "gpipe": (
        "0F0,0F1,0B0,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n"
        "1F0,1F1,1B0,1B1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD\n",
        "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n",
    ),
    "1f1b": (
        "0F0,0F1,0B0,0F2,0B1,0B2,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n"
        "1F1,1B0,1F2,1B1,1F3,1B2,1REDUCE_GRAD,1WAIT_REDUCE_GRAD\n",
        "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n",
    ),
    "interleaved, with its messages": (
        "0UNSHARD,2UNSHARD,0F0,0SEND_F0,2RECV_F0,0F1,0SEND_F1,2RECV_F1,2F0,2SEND_F0,2F1,2SEND_F1,"
        "2RECV_B0,2B0,2WAIT_SEND_F0,2SEND_B0,2RECV_B1,2B1,2WAIT_SEND_F1,2SEND_B1,2REDUCE_GRAD,"
        "2WAIT_REDUCE_GRAD,2RESHARD,0RECV_B0,0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0WAIT_SEND_F1,"
        "0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD,2WAIT_SEND_B0,2WAIT_SEND_B1\n"
        "1UNSHARD,3UNSHARD,1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3RECV_F1,3B0,"
        "3SEND_B0,1RECV_B0,3F1,3B1,3SEND_B1,1RECV_B1,3REDUCE_GRAD,3WAIT_REDUCE_GRAD,3RESHARD,1B0,"
        "1WAIT_SEND_F0,1SEND_B0,1B1,1WAIT_SEND_F1,1SEND_B1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,"
        "1RESHARD,3WAIT_SEND_B0,3WAIT_SEND_B1,1WAIT_SEND_B0,1WAIT_SEND_B1\n",
        "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n",
    ),
    "dual_pipe_v, with its messages": (
        "0UNSHARD,3UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,3RECV_F0,0F2,0SEND_F2,3F0,3RECV_F1,3I0,"
        "3SEND_B0,3W0,3F1,3RECV_F2,0RECV_B0,(0F3;3B1)OVERLAP_F_B,0SEND_F3,3SEND_B1,"
        "(3F2;0B0)OVERLAP_F_B,3RECV_F3,0RECV_B1,3B2,3SEND_B2,(3F3;0B1)OVERLAP_F_B,0RECV_B2,3B3,"
        "3SEND_B3,3REDUCE_GRAD,0RECV_B3,3WAIT_REDUCE_GRAD,3RESHARD,0I2,0W2,0I3,0W3,0REDUCE_GRAD,"
        "0WAIT_REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,2UNSHARD,1RECV_F0,1F0,1RECV_F1,2F0,2SEND_F0,1RECV_F2,1F1,2F1,2SEND_F1,2RECV_B0,"
        "1F2,2B0,(2F2;1B0)OVERLAP_F_B,2SEND_F2,1SEND_B0,1RECV_F3,2RECV_B1,(1F3;2B1)OVERLAP_F_B,"
        "(2F3;1B1)OVERLAP_F_B,2SEND_F3,1SEND_B1,2RECV_B2,2B2,1B2,1SEND_B2,2RECV_B3,2I3,1I3,"
        "1SEND_B3,2W3,2REDUCE_GRAD,2WAIT_REDUCE_GRAD,2RESHARD,1W3,1REDUCE_GRAD,"
        "1WAIT_REDUCE_GRAD,1RESHARD\n",
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,0F3,3B1,3F2,0B0,3B2,3F3,0B1,3B3,0I2,0W2,0I3,0W3\n"
        "1F0,2F0,1F1,2F1,1F2,2B0,2F2,1B0,1F3,2B1,2F3,1B1,2B2,1B2,2I3,1I3,2W3,1W3\n",
    ),
}
"""Orders of torch 2.15 (two ranks; 2, 3, 2 and 4 microbatches), and what they say."""


@pytest.mark.parametrize("name", TORCH)
def test_torchs_tables_are_read_without_their_communication(name):
    text, expected = TORCH[name]
    assert format_csv(parse_csv(text)) == expected


def test_forwards_counted_from_1_without_such_backwards_are_missing_one():
    with pytest.raises(ConfigError, match=r"row 1 lacks 0F2: .* all microbatches, 0 to 2"):
        parse_csv("0F0,0F1,0B0,0B1\n1F1,1F2,1B1,1B2\n")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.csv: the file cannot be read \(.*No such file"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(
        ConfigError, match=r"binary\.csv: the file cannot be read \(it is not UTF-8"
    ):
        read_csv(tmp_path / "binary.csv")
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(ConfigError, match=r"pipe\.csv: the file cannot be read \(.*it is a pipe"):
        read_csv(tmp_path / "pipe.csv")


@settings(max_examples=200)
@given(st.text(alphabet='0123,\n;()FBIWX" ', max_size=40))
def test_any_text_is_read_or_refused(content):
    try:
        found = parse_csv(content)
    except ConfigError:
        return
    assert Task(TaskKind.FORWARD, 0, 0) in found.rows[found.placement[0]]
