"""Bytes and FLOPs of attention over shared sequences, in compiled programs, beside the formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import context
from jaxdist.cost.context import splits_of

NEEDS = replace(context.NEEDS, length=256, heads=8, kv_heads=4, head_dim=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "degree",
    [
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(4, marks=pytest.mark.full),  # the least that has every way
        pytest.param(8, marks=pytest.mark.slow),
    ],
)
def test_bytes_and_balance_are_those_of_the_formulas(degree):
    needs = replace(NEEDS, kv_heads=degree) if degree > 4 else NEEDS
    found = {one.name: one for one in context.bench((degree,), needs).figures}
    for name, figure in found.items():
        if name.startswith("bytes"):
            assert figure.ours == pytest.approx(figure.reference, rel=0.02), name
    ring = f"ring, {degree} devices"
    for order in ("zigzag", "striped"):
        assert found[f"balance of {order} {ring}"].ours <= 1.02
    contiguous = found[f"balance of contiguous {ring}"]
    # Blocks on the diagonal are computed whole: half a block of each row more than the formula's.
    assert contiguous.ours == pytest.approx(contiguous.reference, rel=1 / context.BLOCKS)


@pytest.mark.full
def test_a_window_ends_the_way_of_the_keys():
    split = splits_of("ring", ("context",), 4)[0]
    needs = replace(NEEDS, window=3)
    assert needs.hops(split) == 1
    found = context.of_bytes(split, context.compiled(split, needs), needs)
    assert found.ours == pytest.approx(found.reference, rel=0.02)
    assert found.ours < sum(NEEDS.bytes_received(split)) / 2
