"""The lab of plans: its figures, and predictions of programs compiled here."""

from __future__ import annotations

import dataclasses
import math

import jax
import pytest

from benchmarks.core import lab as core_lab
from benchmarks.core.lab import Lab, LabLink
from benchmarks.planner import lab
from benchmarks.planner.lab_host import Found, Timed, step_of
from benchmarks.planner.lab_rates import (
    REPEATED,
    SIZES,
    Curve,
    Rates,
    Sort,
    curves_of,
    probe_program,
    sizes_of,
    sorts_of,
)
from jaxdist.hlo.account import account
from jaxdist.hlo.groups import MeshLayout
from jaxdist.hlo.ledger import program_text
from jaxdist.hlo.parse import parse
from jaxdist.planner.plan import Plan

SMALL = {
    **lab.VALUES,
    "model": {"type": "gpt", "layers": 2, "embed": 32, "heads": 2, "mlp": 64},
}


def rates(latency_seconds: float, bytes_per_second: float) -> Rates:
    """A link whose all-reduces take as long as each byte once."""
    sort = Sort("all-reduce", 2)
    return Rates(
        {sort: Curve(sort, (0, 1), (latency_seconds, latency_seconds + 1 / bytes_per_second))}
    )


FAST, SLOW = (rates(1e-4, speed) for speed in (1e8, 1e7))
REASON = core_lab.unavailable(Lab(sites=2))


@pytest.mark.full
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
    sums = split.collectives()
    arrays = sum(len(one.dtypes) * one.times_high for one in sums)
    assert arrays > sum(one.times_high for one in sums)
    late = split.predicted(rates(2e-4, 1e8))
    assert late[1] - fast[1] == pytest.approx(arrays * 1e-4)
    assert slow[0] - slow[1] == pytest.approx(fast[0] - fast[1])
    twice, waits = split.predicted(dataclasses.replace(FAST, slower=2.0))
    assert twice - waits == pytest.approx(2 * (fast[0] - fast[1]))
    assert split.predicted(FAST, 2.0) == fast  # no bubble, in which others would have the core
    split.turn()()  # and it runs


@pytest.mark.slow
def test_a_bubble_is_the_time_of_others_where_hosts_share_cores() -> None:
    plan = Plan(stage=2, data=1, zero=0, remat="full", microbatches=2, schedule="1f1b")
    step = step_of({**SMALL, "train": {"steps": 1, "batch_size": 2}}, plan, jax.devices()[:2])
    free = Rates({sort: Curve(sort, (4, 8), (0.0, 0.0)) for sort in sorts_of(step.collectives())})
    own, shared, crowded = (step.predicted(free, hosts)[0] for hosts in (1.0, 1.2, 100.0))
    # Two stages, two microbatches: three turns, in two of which one of the stages waits.
    assert shared == pytest.approx(own / 1.2)
    assert own / 1.6 < crowded < shared
    assert step.predicted(free, 1e6)[0] == crowded


def test_a_curve_is_straight_between_the_sizes_that_were_timed() -> None:
    sorts = [Sort("all-gather", 4), Sort("all-reduce", 2)]
    sizes = [size for sort in sorts for size in sizes_of(sort)]
    assert min(sizes_of(sorts[0])) == 16  # of one number from each
    found = curves_of(sorts, [REPEATED * size for size in sizes])
    for curve in found.values():
        assert [curve.at(size) for size in (4096, 1e6, 1e7)] == pytest.approx([4096, 1e6, 1e7])
    assert found[sorts[0]].at(1) == 16


@pytest.mark.parametrize(
    "kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]
)
def test_a_probe_holds_the_collectives_that_it_times(kind: str) -> None:
    for size, group in ((4096, 4), (sizes_of(Sort(kind, 2))[0], 2)):
        run, x = probe_program(Sort(kind, group), size)
        module = parse(program_text(run))
        sizes = {"groups": jax.device_count() // group, "members": group}
        layout = MeshLayout(sizes, tuple(range(jax.device_count())))
        found = account(module, layout).collectives
        assert {(one.kind, one.group_size, one.payload_bytes) for one in found} == {
            (kind, group, size)
        }
        assert sum(one.times_high for one in found) == REPEATED
        assert jax.numpy.allclose(run(x), 1.0)


def test_figures_say_how_many_times_are_near_and_in_order() -> None:
    hosts = Lab(sites=4, across=LabLink(100e6))
    timed = (
        Timed("a", (1.0, 1.1, 1.2), 1.0, 0.5),
        Timed("b", (2.0, 2.0, 2.0), 2.6, 0.5),
        Timed("c", (3.0, 3.0, 3.0), 2.5, 0.5),
    )
    curve = Curve(Sort("all-reduce", 4), (4, 2**21), (1e-3, 0.2))
    found = Found((curve,), 0.1, timed)
    tau, near = lab.figures_of(hosts, found)
    assert tau.name == "ranking, 4 hosts, 100 Mbit/s"
    assert (tau.ours, near.ours) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert not tau.holds
    assert "a host's work takes 100 ms" in tau.note
    probed = lab.probed(hosts, found)
    assert list(probed.columns)[1::5] == ["4 B", "2048 KiB"]
    assert probed.rows == [("all-reduce of 4", *map(curve.at, SIZES))]
    assert lab.listing(hosts, found).rows[1][-1] == pytest.approx(1.3)


def test_without_a_lab_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_lab, "unavailable", lambda hosts: "no namespaces")
    (figure,) = lab.bench().figures
    assert math.isnan(figure.ours)
    assert figure.note == "skipped: no namespaces"


@pytest.mark.slow  # tests/bench/core/test_lab.py, test_predictions_are_of_the_plans_own_programs
@pytest.mark.skipif(REASON is not None, reason=f"no slow-link lab: {REASON}")
def test_two_hosts_of_a_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "VALUES", SMALL)
    hosts = Lab(sites=2, across=LabLink(100e6))
    found = lab.measure(hosts, [Plan(data=2, zero=0)], warmup=0, repeats=1)
    (one,) = found.timed
    assert one.words == "data 2, ZeRO 0, full"
    assert min(one.seconds) > 0
    assert 0 < one.waits < one.predicted
    (sums,) = found.curves
    assert sums.sort == Sort("all-reduce", 2)
    # As many bytes leave a host as it has; the first 64 KiB of them may go at once.
    assert sums.seconds[-1] > (sums.sizes[-1] - 2**16) / hosts.across.payload_bytes_per_s
