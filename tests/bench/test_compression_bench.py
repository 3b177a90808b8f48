"""The bench of compression: every figure is there, bytes are the compiled program's own."""

from __future__ import annotations

import pytest

from benchmarks.compression import codecs as compression
from jaxdist.compression import Sign, WholeCodec


@pytest.mark.slow
def test_every_figure_is_there_and_bytes_meet_their_goals(devices, monkeypatch):
    monkeypatch.setattr(compression, "SENT", {"sign": compression.SENT["sign"]})
    monkeypatch.setattr(compression, "TIMED", {"sign": Sign()})
    copy, sort, sent, received = compression.bench(repeats=1, size=2**14, side=512).figures
    assert (copy.goal, sort.goal) == ("<= 3.33", "<= 0.2")
    assert copy.ours > 0 < sort.ours
    assert sent.holds
    assert received.holds
    assert received.ratio > 0.99


def test_no_compression_sends_a_ring_and_would_miss_the_goals(devices):
    figure = compression.sent("whole", WholeCodec(), "<= 0.501", 64)
    assert figure.ratio == pytest.approx(1, abs=1e-3)
    assert figure.holds is False
