"""What is executed: two forms of one step agree, and their work is counted in two ways."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from benchmarks.core import child
from benchmarks.pipeline import work as pipeline_work
from benchmarks.pipeline.program import ModelSize, arguments, parts, stage_mesh
from benchmarks.pipeline.work import WorkCell, executed_flops, programs, same
from jaxdist.errors import RunError
from jaxdist.hlo import ledger
from jaxdist.parallel.pipeline.executor.model_fns import GradientsAndSums, Visit

SMALL = ModelSize(rows=4, features=8, layers=2)
P, M = 2, 4
CELLS = [
    WorkCell("recompute", 4, 4, 100, 175, 100, 60, 112, 64, (1.0, 1.2, 1.1), (2.0, 2.0, 2.2)),
    WorkCell("recompute", 4, 8, 200, 275, 200, 120, 176, 128),
    WorkCell("stash", 4, 16, 330, 357, 300, 192, 228, 192),
]


@cache
def forms(activations):
    return programs(SMALL, P, M, activations)


@cache
def alone():
    """Loss and gradients on one device."""
    given, model = arguments(SMALL, P, M), parts()

    def total(weights_CNDD, scale):
        found = 0.0
        for row in jnp.asarray(given.rows):
            visit = Visit(row, jnp.int32(0), None)
            x = model.embed(scale, visit)
            for weights_NDD in weights_CNDD:
                x = model.blocks(weights_NDD, x, visit)
            found += model.head(scale, x, visit)[0]
        return found

    step = jax.value_and_grad(total, (0, 1))
    value, grads = jax.jit(step)(jnp.asarray(given.weights), given.scale)
    return GradientsAndSums(*grads, value)


@pytest.mark.parametrize("activations", ["recompute", "stash"])
@pytest.mark.every(2)
def test_both_forms_do_what_one_device_does(activations):
    _, ours, scan = forms(activations)
    same(ours(), alone())
    same(scan(), alone())


def test_forms_that_differ_are_not_raced():
    found = alone()
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        same(found, found._replace(sums=found.sums * 1.001))


@pytest.mark.parametrize(("activations", "passes"), [("recompute", 4), ("stash", 3)])
def test_work_by_the_programs(activations, passes):
    """The executor's is the model's; the usual scan's is (m + p - 1) / m of that."""
    ticks, ours, scan = forms(activations)
    mesh, model = stage_mesh(P), SMALL.model_flops(activations, M)
    assert model == passes * M * 2 * (2 * 4 * 8 * 8)
    assert executed_flops(ticks, ledger(ours.step, mesh)) == model
    assert ledger(scan.step, mesh).flops_high == model * (M + P - 1) / M


def test_the_models_work_is_that_of_a_gradient():
    given, model = arguments(SMALL, 1, 1), parts()

    def loss(weights_NDD, x_RD):
        return model.blocks(weights_NDD, x_RD, Visit(x_RD, jnp.int32(0), None)).sum()

    step = jax.jit(jax.grad(loss, (0, 1)))
    compiled = step.lower(given.weights[0], given.rows[0]).compile()
    assert ledger(compiled, stage_mesh(1)).flops_high == SMALL.model_flops("stash", 1)


def test_work_outside_of_conditionals_is_not_passed_over():
    ticks, _, scan = forms("stash")
    with pytest.raises(AssertionError, match="outside of the conditionals"):
        executed_flops(ticks, ledger(scan.step, stage_mesh(P)))


@pytest.mark.parametrize(
    ("activations", "ours", "scan"),
    # The last stage's forward tasks are nothing where backward tasks compute them again.
    [
        ("recompute", M * (4 * P - 1), 4 * P * (M + P - 1)),
        ("stash", 3 * P * M, 3 * P * (M + P - 1)),
    ],
)
@pytest.mark.every(2)
def test_work_by_the_passes_that_run(activations, ours, scan):
    assert pipeline_work.counted(P, M, activations) == (ours, scan)


def test_a_cell(monkeypatch):
    monkeypatch.setattr(pipeline_work, "SIZE", SMALL)
    monkeypatch.setattr(pipeline_work, "PAIRS", 2)
    monkeypatch.setattr(pipeline_work, "programs", lambda *args: forms(args[3]))
    monkeypatch.setattr(pipeline_work, "counted", lambda *args: (24, 30))
    plain = pipeline_work.cell(P, M, "stash", timed=False)
    assert plain.flops == plain.model_flops
    assert plain.scan_flops == 1.25 * plain.model_flops
    assert (plain.passes, plain.scan_passes, plain.model_passes) == (24, 30, 24)
    assert plain.seconds == plain.scan_seconds == ()
    timed = pipeline_work.cell(P, M, "stash", timed=True)
    assert len(timed.seconds) == len(timed.scan_seconds) == 2
    assert dataclasses.replace(timed, seconds=(), scan_seconds=()) == plain


def test_figures_show_the_worst():
    flops, passes, time = pipeline_work.figures(CELLS)
    assert (flops.ratio, flops.holds) == (1.1, False)
    assert "the worst of 3 is 16 microbatches, stash, where the usual scan has 1.190" in flops.note
    assert (passes.ratio, passes.holds) == (1, True)
    assert passes.note.endswith("where the usual scan runs 228")
    assert (time.name, time.holds) == ("step time over the usual scan's, recompute", True)
    assert time.ratio == 0.5
    slow = dataclasses.replace(CELLS[0], seconds=(1.4, 1.4, 1.4))
    assert pipeline_work.figures([slow])[2].holds is False


def test_the_listing_fits_80_columns():
    listing = pipeline_work.listing(CELLS)
    assert listing.rows[0] == ("recompute", 4, "1.000", "0.938", "1.750", "1.750", "1.750")
    console = Console(width=80)
    assert console.measure(listing.table()).maximum <= 80


def test_cells_come_from_a_process_with_a_device_for_each_stage(monkeypatch):
    seen = {}

    def run(command, env, timeout, **_):
        seen.update(command=command, flags=env["XLA_FLAGS"], timeout=timeout)
        text = json.dumps([dataclasses.asdict(one) for one in CELLS])
        return subprocess.CompletedProcess(command, 0, text, "")

    monkeypatch.setattr(subprocess, "run", run)
    assert pipeline_work.measure() == CELLS
    assert "device_count=4" in seen["flags"]
    assert seen["command"][2:] == [
        "-m",
        "benchmarks.core.child",
        "benchmarks.pipeline.work:cells",
    ]
    assert seen["timeout"] == child.TIMEOUT_SECONDS


def test_it_always_ends(monkeypatch):
    monkeypatch.setattr(child, "TIMEOUT_SECONDS", 0.01)
    with pytest.raises(RunError, match=r"the executor beside the usual scan is not done after 0.0"):
        pipeline_work.measure()


def test_the_cells(monkeypatch):
    monkeypatch.setattr(pipeline_work, "cell", lambda *_, timed: CELLS[0] if timed else CELLS[1])
    found = [*pipeline_work.cells()]
    assert [one.microbatches for one in found] == [4, 8, 8] * 2
    assert found[0].seconds == CELLS[0].seconds
