"""The predicted time as people see it: tables, JSON, picture."""

import dataclasses
import io
import math

import pytest
from rich.console import Console

from jaxdist.cost.step_time import StepTime
from jaxdist.hlo.entries import Entry
from jaxdist.hlo.ledger import NO_MEMORY
from jaxdist.hlo.records import Ledger
from jaxdist.inspect.program import Inspection
from jaxdist.inspect.times import (
    dearest,
    draw_times,
    parts_of,
    print_times,
    source_name,
    times_json,
)

ENTRIES = (
    Entry("f.1", "jit(train)/while/body/attention/dot_general", "compiler", (), "fusion", 80, 4, 4),
    Entry("f.2", "jit(train)/while/body/attention/dot_general", "compiler", (), "fusion", 80, 2, 2),
    Entry("g.1", "", "links", ("data",), "all-gather", 160, 5.0, 1.5),
    Entry("k.1", "jit(train)/splash", "assumed", (), "splash: FLOPs at 50% of peak", 80, 2, 2),
    Entry("c.1", "", "copy", (), "memory", 80, 1.0, 0.5),
)
TIME = StepTime(
    seconds=10.0,
    seconds_low=8.0,
    compute_seconds=8.0,
    assumed_seconds=2.0,
    copy_seconds=0.5,
    exposed_seconds={"data": 1.5},
    overlapped_seconds={"data": 3.5},
    entries=ENTRIES,
    unknown_loops=(),
)


def inspection(**changes):
    ledger = Ledger((), 0.0, 0.0, NO_MEMORY, 64, {"data": 64})
    made = Inspection(
        config="c.yaml", model="gpt, 7 parameters", step="640 tokens", device_kind="TPU v5",
        ledger=ledger, program_sha256="", model_flops=4.59e14 * 64 * 6, gradient_axes=(),
        gradient_bound_bytes=0.0, arguments={}, memory_bytes=None, compile_seconds=1.0,
        bound_notes=(), step_time=TIME, masked_flops=4.59e14 * 64, tokens=640,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def printed(found):
    out = io.StringIO()
    print_times(found, Console(file=out, width=80))
    return out.getvalue()


def test_the_parts_add_up_to_the_step():
    assert math.fsum(parts_of(TIME).values()) == TIME.seconds


def test_both_definitions_of_mfu():
    assert inspection().mfu(masked=True) == pytest.approx(0.6)
    assert inspection().mfu(masked=False) == pytest.approx(0.5)
    assert inspection(step_time=None).mfu(masked=True) is None


def test_operations_are_put_together_and_sorted():
    first, *others = dearest(TIME)
    assert (first.name, first.times, first.seconds) == ("attention/dot_general", 160, 6)
    assert [source.name for source in others] == [
        "kernel: splash",
        "all-gather: all-gather, from XLA",
        "memory, from XLA",
    ]
    assert [source.assumed for source in dearest(TIME)] == [False, True, False, False]


def test_the_table_fits_80_columns_and_says_what_is_assumed():
    text = printed(inspection())
    tables = [line for line in text.splitlines() if not line.startswith(("MFU", "Assumed"))]
    assert max(map(len, tables)) <= 80
    for part in (
        "MFU 50.0% (causal attention counts half), 60.0%",
        "1 tokens a second and chip",
        "waits for data",
        "kernel: splash *",
        "Assumed: splash: FLOPs at 50% of peak.",
        "With the cheapest branches, the step takes 8 s.",
        "Beside compute: 3.5 s over data.",
    ):
        assert part in text


def test_a_loop_of_unknown_length_is_said_loudly():
    time = dataclasses.replace(TIME, unknown_loops=("while.7",))
    assert "THE STEP TAKES LONGER" in printed(inspection(step_time=time))


def test_a_schedule_that_is_not_in_the_program_is_said_loudly():
    time = dataclasses.replace(TIME, unmatched="the program's loop has 7 iterations instead of 8")
    text = " ".join(printed(inspection(step_time=time)).split())
    assert (
        "NOT THE TIME OF THE PIPELINE'S STEP: the program's loop has 7 iterations instead of 8"
        in text
    )
    assert "With the cheapest branches, the step takes 8 s." in text


def test_the_bubble_is_a_part_and_a_source():
    bubble = Entry("l", "jit(f)/while", "schedule", (), "bubble of 1f1b", 1, 2.0, 2.0)
    time = dataclasses.replace(
        TIME, seconds=12.0, bubble_seconds=2.0, entries=(*ENTRIES, bubble), schedule="1f1b, 9 ticks"
    )
    assert math.fsum(parts_of(time).values()) == time.seconds
    assert "bubble of 1f1b" in [source.name for source in dearest(time)]
    text = " ".join(printed(inspection(step_time=time)).split())
    assert "bubble of the pipeline │ 2 s │ 16.7%" in text
    assert "Each tick takes the branches of the schedule (1f1b, 9 ticks)" in text


def test_what_only_wrappers_enclose_is_called_by_its_operation():
    source = "jit(f)/shard_map/while/body/closed_call/cond/branch_1_fun"
    assert source_name(Entry("f.1", source, "compiler", (), "fusion", 1, 0.0, 0.0)) == "fusion"


def test_where_there_are_no_estimates_none_is_made_up():
    found = inspection(step_time=None, device_kind="cpu")
    assert "only the compiler for TPUs" in printed(found)
    assert times_json(found) is None


def test_json_and_picture(tmp_path):
    found = times_json(inspection())
    assert found["parts"]["waits for data"] == 1.5
    assert [entry["name"] for entry in found["entries"]] == ["k.1"]
    assert draw_times(inspection(), tmp_path).read_text().startswith("<?xml")


def test_a_kernel_and_a_copy_of_one_operation_are_listed_beside_it():
    op = "jit(train)/attention/splash"
    entries = (
        Entry("k.1", op, "assumed", (), "splash: half of the peak", 1, 2.0, 2.0),
        Entry("copy.1", op, "compiler", (), "copy", 1, 1.0, 1.0),
        Entry("f.1", op, "compiler", (), "fusion", 1, 0.5, 0.5),
    )
    found = dearest(dataclasses.replace(TIME, entries=entries))
    assert [(one.name, one.seconds) for one in found] == [
        ("kernel: attention/splash", 2.0),
        ("copy: attention/splash", 1.0),
        ("attention/splash", 0.5),
    ]
