"""The bench of parameter servers on slow links: its predictions, and how times are read."""

from __future__ import annotations

import pytest

from benchmarks.collectives.lab import MESSAGE_SECONDS
from benchmarks.core.lab import LabLink
from benchmarks.param_server import lab
from benchmarks.param_server.host import Case
from jaxdist.simulation.engine.network import HEADER_BYTES

LINK = LabLink(100e6)


def test_one_worker_in_rounds_takes_its_step_and_both_ways():
    case = Case("alone", {"type": "bsp"}, (0.1,))
    one_way = MESSAGE_SECONDS + (4 * lab.FLOATS + HEADER_BYTES) / LINK.payload_bytes_per_s
    assert lab.simulated(case, LINK, 8.0) == pytest.approx(0.1 + 2 * one_way, rel=1e-3)


def test_a_slow_worker_holds_rounds_up_and_not_those_who_do_not_wait():
    link = LabLink(1e9)

    def found(model: str, speeds: tuple[float, ...]) -> float:
        return lab.simulated(Case(model, lab.MODELS_SHOWN[model], speeds), link, 4.0)

    one_way = 4 * lab.FLOATS / link.payload_bytes_per_s
    least = max(lab.STRAGGLER) + 2 * one_way  # the slow one has the card for itself when it pushes
    assert least < found("bsp", lab.STRAGGLER) < found("bsp", lab.EQUAL) + lab.STEP_SECONDS
    assert found("async", lab.STRAGGLER) < 1.3 * found("async", lab.EQUAL)


def test_a_step_is_read_from_the_times_of_updates():
    updates = 3
    times = [0.0] * (lab.WARMUP * updates) + [2.0 + 0.25 * at for at in range(9)]
    assert lab.step_seconds(times, updates) == pytest.approx(0.75)
