from __future__ import annotations

import pytest

from benchmarks import attention
from jaxdist.models.attention.blockwise import Blockwise
from jaxdist.models.attention.plain import Plain


@pytest.mark.slow
def test_the_report_holds_time_and_memory(monkeypatch):
    monkeypatch.setattr(attention, "WARMUP", 0)
    monkeypatch.setattr(attention, "ROWS", 1)
    time, half, whole, beside = attention.bench(repeats=1, length=64, long=2048).figures
    assert (time.goal, half.goal, whole.goal, beside.goal) == ("<= 1.1", "<= 1.05", "<= 1.05", "")
    assert whole.name == "blockwise memory, 2048"
    assert whole.reference == 2 * half.ours
    assert whole.holds
    assert beside.ours < beside.reference


def test_plain_attention_would_miss_the_goal_of_memory():
    kernels = (Plain(), Blockwise())
    growth = [attention.temp_bytes(k, 2048) / attention.temp_bytes(k, 1024) for k in kernels]
    assert growth[0] > 3
    assert growth[1] < 2.1
