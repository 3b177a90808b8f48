"""The table of simulated variants, where a figure of the first variant is 0."""

from __future__ import annotations

from collections import Counter

from jaxdist.simulation.compared import SimulatedVariant, variants_table
from jaxdist.simulation.engine.report import Point, Report, WorkerReport
from jaxdist.study.variants import Variant


def ended_with(loss: float) -> SimulatedVariant:
    """A variant whose one run ends with this loss."""
    report = Report(
        params={},
        seconds=2.0,
        curve=(Point(2.0, 8, 4.0, 4, loss),),
        work=(WorkerReport(8, 2.0, 0.0, 0),),
        staleness=Counter(),
        updates_per_step=1,
        dropped=Counter(),
        received_bytes=(0,),
        sent_bytes=(0,),
        rack_received_bytes=(),
        lost=0,
        reads=0,
        largest_lead=0,
        bound=None,
        largest_value=0.0,
    )
    return SimulatedVariant(Variant(f"ends with {loss:g}"), (0,), (report,))


def test_a_loss_of_zero_and_traffic_of_zero_have_no_ratio() -> None:
    shown = variants_table([ended_with(0.0), ended_with(0.5)], (1.0,)).splitlines()
    assert shown[1].split()[:5] == ["ends", "with", "0", "0.0000", "0.0000"]
    assert "%" not in shown[2].removesuffix("0%")
