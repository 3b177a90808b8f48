"""The CSV form: what is written is read back; what is wrong is named by row, column and value."""

import os

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxdist.errors import ConfigError
from jaxdist.parallel.pipeline.csv_form import format_csv, parse_csv, read_csv, write_csv
from jaxdist.parallel.pipeline.dual_pipe_v import dual_pipe_v
from jaxdist.parallel.pipeline.gpipe import gpipe
from jaxdist.parallel.pipeline.interleaved import interleaved
from jaxdist.parallel.pipeline.schedule import Kind, Task
from jaxdist.parallel.pipeline.simulate import in_ticks
from jaxdist.parallel.pipeline.zero_bubble import zb_h1
from jaxdist.parallel.pipeline.zero_bubble_v import v_min


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
    "missing": (text((2, 4, "")), r"row 2 lacks 1F1: microbatches 0 to 1 .* add 1F1, or take .* 1"),
    "missing half": (text((2, 3, "1I0")), r"row 2 lacks 1W0: .* take microbatch 0 out"),
    "twice": (text((1, 3, "0F1")), r"row 1, column 3: 0F1 is there already, in row 1, column 2"),
    "two rows": (
        text((2, 1, "0F0")),
        r"row 2, column 1: 0F0: chunk 0 lies on row 1 \(0F0 in column 1\).*: move it to row 1",
    ),
    "no such chunk": (
        text().replace("1F", "2F").replace("1B", "2B"),
        r"chunk 1 has no task, but chunk 2 has: number the chunks 0 to 1",
    ),
    "deadlock": (
        text((2, 2, "1B0"), (2, 3, "1F0")),
        r"stage 1, place 1: 1B0 needs 1F0, which comes after it, at place 2: swap them",
    ),
    "empty": ("\n\n", r"no tasks: give one row per stage"),
    "idle row": (text() + ",,\n", r"stage 2 of 3 holds no chunk"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case):
    table, message = WRONG[case]
    with pytest.raises(ConfigError, match=rf"schedule mine\.csv: {message}"):
        parse_csv(table, name="mine.csv")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.csv: cannot be read \(.*No such file"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.csv: cannot be read \(.*utf-8"):
        read_csv(tmp_path / "binary.csv")
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(ConfigError, match=r"pipe\.csv: cannot be read \(.*it is a pipe, not a reg"):
        read_csv(tmp_path / "pipe.csv")


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet='0123,\n;()FBIWX" ', max_size=40))
def test_any_text_is_read_or_refused(content):
    try:
        found = parse_csv(content)
    except ConfigError:
        return
    assert Task(Kind.FORWARD, 0, 0) in found.rows[found.placement[0]]
