from __future__ import annotations

import dataclasses
import io

import pytest
from ledgers import collective, inspection
from rich.console import Console

from jaxdist.inspect.rows import by_axes, by_kind, show_bytes, show_number
from jaxdist.inspect.tables import bound_bytes, print_inspection

MANY = inspection(
    collective(axes=None, kind="all-to-all", payload_bytes=8, sent_bytes=7.0),
    collective(axes=("data", "tensor"), times_low=0, times_high=3),
    collective(axes=("tensor",), dtypes=("bf16", "f32")),
    collective(axes=("data",), kind="all-gather", sent_bytes=9_000.0, overlapped=True),
    collective(axes=("data",), times_low=12, times_high=12),
    collective(axes=("data",), dtypes=("bf16",), overlapped=True),
)


def printed(shown: object) -> str:
    out = io.StringIO()
    print_inspection(shown, Console(file=out, width=80, highlight=False))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    return out.getvalue()


def cells(text: str, *start: str) -> list[str]:
    """The cells of the one table row that begins so."""
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
    (found,) = (row for row in rows if row[: len(start)] == list(start) and len(row) > len(start))
    return found[len(start) :]


def test_rows_of_axes_and_kinds() -> None:
    rows = [(row.label, row.kind) for row in by_kind(MANY.ledger)]
    assert rows == [
        ("data", "all-reduce"),
        ("data", "all-gather"),
        ("tensor", "all-reduce"),
        ("data x tensor", "all-reduce"),
        ("other groups", "all-to-all"),
    ]
    reduce, gather = by_kind(MANY.ledger)[:2]
    assert (reduce.times, reduce.dtypes, reduce.payload_bytes) == ("13", ("bf16", "f32"), 13_000)
    assert (reduce.sent_bytes, reduce.overlapped_bytes) == (13 * 1_500, 1_500)
    assert gather.exposed_bytes == 0
    data = by_axes(MANY.ledger)[0]
    assert (data.sent_bytes, data.exposed_bytes) == (13 * 1_500 + 9_000, 12 * 1_500)
    assert by_axes(MANY.ledger)[2].times == "0-3"
    total = sum(row.sent_bytes for row in by_axes(MANY.ledger))
    assert total == sum(row.sent_bytes for row in by_kind(MANY.ledger)) == MANY.ledger.sent_bytes()


def test_only_the_batch_axes_have_a_bound() -> None:
    bounds = [bound_bytes(MANY, row) for row in by_axes(MANY.ledger)]
    assert bounds == [1_500.0, None, None, None]
    alone = dataclasses.replace(MANY, gradient_axes=(), gradient_bound_bytes=0.0)
    assert [bound_bytes(alone, row) for row in by_axes(alone.ledger)] == [None] * 4


def test_two_networks_are_held_against_one_bound() -> None:
    networks = ("data_dcn", "data_ici")
    levels = inspection(
        collective(axes=networks[1:], kind="reduce-scatter", sent_bytes=600.0),
        collective(axes=networks[:1], sent_bytes=300.0),
        collective(axes=networks[1:], kind="all-gather", sent_bytes=600.0),
        collective(axes=("tensor",)),
        collective(axes=(), sent_bytes=0.0),
        gradient_axes=networks,
    )
    ledger = dataclasses.replace(levels.ledger, axes=dict.fromkeys((*networks, "tensor"), 2))
    levels = dataclasses.replace(levels, ledger=ledger)
    rows = by_axes(ledger, networks)
    assert [(row.label, row.sent_bytes) for row in rows] == [
        ("one device", 0),
        ("tensor", 1_500),
        ("data_dcn x data_ici", 1_500),
    ]
    assert len(by_kind(ledger)) == 5
    assert cells(printed(levels), "data_dcn x data_ici")[:3] == ["1.5 kB", "1.5 kB", "1.000"]


def test_everything_is_printed_at_80_columns() -> None:
    text = printed(MANY)
    assert "mesh   {data: 4, tensor: 2} on 8 x TPU v5 lite" in text
    assert cells(text, "data", "all-reduce") == ["bf16 f32", "13", "13 kB", "19.5 kB"]
    assert cells(text, "data", "28.5 kB") == ["1.5 kB", "19.000", "10.5 kB", "18 kB"]
    assert cells(text, "tensor", "1.5 kB") == ["-", "-", "0 B", "1.5 kB"]
    assert "No bound is known for tensor, data x tensor, other groups." in text
    assert cells(text, "matmul, conv") == ["2 G", "1 G", "2.000"]
    assert cells(text, "peak") == ["9 kB", "10.00%"]
    assert cells(text, "outputs, new") == ["10 B", "0.01%"]
    assert "buffers" not in text


def test_the_longest_names_still_fit() -> None:
    axes = ("data_dcn", "data_ici", "tensor", "context")
    wide = inspection(
        collective(axes=axes[2:], kind="collective-permute", dtypes=("bf16", "f32", "s8")),
        collective(axes=axes[:2], times_low=10**6, times_high=10**7, payload_bytes=10**15),
        gradient_axes=axes[:2],
    )
    ledger = dataclasses.replace(wide.ledger, axes=dict.fromkeys(axes, 2))
    text = printed(dataclasses.replace(wide, ledger=ledger))
    assert "Bound of data_dcn x data_ici: one all-reduce of the gradients." in text
    assert "This bound leaves out that stage 3 gathers." in text


def test_what_is_not_known_or_not_there() -> None:
    text = printed(inspection(memory_bytes=None, flops_low=1e9))
    assert "has no collectives" in text
    assert cells(text, "matmul, conv") == ["1 G-2 G", "1 G", "2.000"]
    assert cells(text, "peak") == ["9 kB", "-"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (999.9, "1 kB"), (1e6, "1 MB"), (2.5e20, "250 EB")],
)
def test_show_bytes(value: float, text: str) -> None:
    assert show_bytes(value) == text


def test_show_number() -> None:
    assert show_number(1234567) == "1.23 M"


def test_a_loop_of_unknown_length_bounds_nothing() -> None:
    found = inspection(collective(axes=("data",), times_low=2, times_high=3, bounded=False))
    ledger = dataclasses.replace(found.ledger, unknown_loops=("jit(f)/while",))
    text = printed(dataclasses.replace(found, ledger=ledger))
    assert "2 or more" in text
    assert "each is counted as a single" in " ".join(text.split())
