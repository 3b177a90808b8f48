from __future__ import annotations

import io

from ledgers import MEMORY, collective, inspection
from rich.console import Console

from jaxdist.inspect.diff import Difference, LedgerChange, difference, print_difference


def printed(found: Difference) -> str:
    out = io.StringIO()
    print_difference(found, Console(file=out, width=80, highlight=False))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    return out.getvalue()


def test_the_same_program() -> None:
    found = difference(inspection(collective()), inspection(collective(name="all-reduce.9")))
    assert found.to_json() == {"verdict": "same program", "changes": []}
    assert "This setting changed nothing" in printed(found)


def test_the_same_numbers_of_another_program() -> None:
    found = difference(inspection(collective()), inspection(collective(), program_sha256="b"))
    assert found.to_json() == {"verdict": "same numbers", "changes": []}
    text = " ".join(printed(found).split())
    assert "The two programs differ, but only in instructions" in text
    assert "changed nothing" not in text


def test_every_number_that_changed() -> None:
    before = inspection(collective(), collective(kind="all-gather", sent_bytes=10.0))
    after = inspection(
        collective(dtypes=("bf16",), payload_bytes=500, sent_bytes=750.0),
        collective(axes=("tensor",), overlapped=True),
        flops_high=3e9,
        memory=type(MEMORY)(4_000, 3_010, 3_000, 7_500, 0, 11_500),
        arguments={"parameters": 500, "optimizer state": 2_000, "buffers": 0, "batch": 64},
        program_sha256="b",
    )
    found = difference(before, after)
    assert found.verdict == "different"
    changes = set(found.changes)
    assert changes >= {
        LedgerChange("data: all-reduce", "dtype", "f32", "bf16"),
        LedgerChange("data: all-reduce", "sent_bytes", 1_500, 750),
        LedgerChange("data: all-gather", "times", "1", None),
        LedgerChange("tensor: all-reduce", "overlapped_bytes", None, 1_500),
        LedgerChange("FLOPs", "program", 2e9, 3e9),
        LedgerChange("FLOPs", "at least", None, 2e9),
        LedgerChange("memory", "parameters_bytes", 1_000, 500),
        LedgerChange("memory", "temp_bytes", 5_000, 7_500),
        LedgerChange("memory", "peak_bytes", 9_000, 11_500),
    }
    assert not {c for c in changes if c.what in ("ideal", "batch_bytes", "code_bytes", "axes")}
    text = printed(found)
    for cell in ("0.500", "1.500", "750 B", "all-gather", "3 G"):
        assert cell in text
    assert "changed nothing" not in text


def test_times_alone_are_a_change() -> None:
    once, maybe = inspection(collective()), inspection(collective(times_low=0))
    (change,) = difference(once, maybe).changes
    assert change == LedgerChange("data: all-reduce", "times", "1", "0-1")
