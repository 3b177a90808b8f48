"""The lab of plans: its figures, and predictions of programs compiled here."""

from __future__ import annotations

import dataclasses
import math

import jax
import pytest

from jaxdist.bench.core import lab as core_lab
from jaxdist.bench.core.lab import Lab, LabLink
from jaxdist.bench.planner import lab
from jaxdist.bench.planner.lab_host import Found, Rates, Timed, step_of
from jaxdist.hlo.account import account
from jaxdist.planner.plan import Plan
from jaxdist.runtime.hardware import Link

SMALL = {
    **lab.VALUES,
    "model": {"type": "gpt", "layers": 2, "embed": 32, "heads": 2, "mlp": 64},
}
FAST, SLOW = (Rates(Link(1e-4, speed)) for speed in (1e8, 1e7))
REASON = core_lab.unavailable(Lab(sites=2))


def test_predictions_are_of_the_plans_own_programs() -> None:
    devices = jax.devices()[:2]
    split = step_of(SMALL, Plan(data=2, zero=0, remat="minimal"), devices)
    alone = step_of(SMALL, Plan(zero=0, remat="minimal"), devices[:1])
    assert alone.predicted(FAST)[1] == 0
    fast, slow = split.predicted(FAST), split.predicted(SLOW)
    # An all-reduce between two hosts sends each gradient once; that of the embedding is summed as
    # the table's and as the head's, and the loss with them.
    params = split.program.state_shapes.params
    size_bytes = 4 * sum(x.size for x in jax.tree.leaves(params)) + 4 * 256 * 32 + 4
    assert slow[1] - fast[1] == pytest.approx(size_bytes * (1e-7 - 1e-8), rel=0.05)
    # Each of its arrays is a message by itself, however XLA combines them.
    late = dataclasses.replace(FAST, link=Link(2e-4, 1e8))
    sums = account(split.module, split.layout).collectives
    arrays = sum(len(one.dtypes) * one.times_high for one in sums)
    assert arrays > sum(one.times_high for one in sums)
    assert split.predicted(late)[1] - fast[1] == pytest.approx(arrays * 1e-4)
    assert slow[0] - slow[1] == pytest.approx(fast[0] - fast[1])
    twice, waits = split.predicted(dataclasses.replace(FAST, slower=2.0))
    assert twice - waits == pytest.approx(2 * (fast[0] - fast[1]))
    split.turn()()  # and it runs


def test_figures_say_how_many_times_are_near_and_in_order() -> None:
    hosts = Lab(sites=4, across=LabLink(100e6))
    timed = (
        Timed("a", (1.0, 1.1, 1.2), 1.0, 0.5),
        Timed("b", (2.0, 2.0, 2.0), 2.6, 0.5),
        Timed("c", (3.0, 3.0, 3.0), 2.5, 0.5),
    )
    found = Found(1e-3, 1e7, 0.1, timed)
    tau, near = lab.figures_of(hosts, found)
    assert tau.name == "ranking, 4 hosts, 100 Mbit/s"
    assert (tau.ours, near.ours) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert not tau.holds
    assert "a message takes 1 ms, a link carries 10 of 12 MB/s" in tau.note
    assert lab.listing(hosts, found).rows[1][-1] == pytest.approx(1.3)


def test_without_a_lab_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_lab, "unavailable", lambda hosts: "no namespaces")
    (figure,) = lab.bench().figures
    assert math.isnan(figure.ours)
    assert figure.note == "skipped: no namespaces"


@pytest.mark.full  # test_predictions_are_of_the_plans_own_programs is the quicker neighbour
@pytest.mark.skipif(REASON is not None, reason=f"no slow-link lab: {REASON}")
def test_two_hosts_of_a_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "VALUES", SMALL)
    hosts = Lab(sites=2, across=LabLink(100e6))
    found = lab.measure(hosts, [Plan(data=2, zero=0)], warmup=0, repeats=1)
    (one,) = found.timed
    assert one.words == "data 2, ZeRO 0, full"
    assert min(one.seconds) > 0
    assert 0 < one.waits < one.predicted
    assert found.bytes_per_second <= hosts.across.payload_bytes_per_s
