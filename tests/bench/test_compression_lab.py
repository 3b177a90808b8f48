"""The bench of compression between hosts: its network, its figures, and a lab of two hosts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.compression import lab as compression_lab
from benchmarks.compression import lab_figures, report, step
from benchmarks.compression.host import Timed
from benchmarks.compression.lab import FLAT, Found, links
from benchmarks.core import lab
from benchmarks.core.lab import Lab, LabLink
from jaxdist.errors import RunError

REASON = lab.unavailable(Lab())
live = pytest.mark.skipif(REASON is not None, reason=f"no slow-link lab: {REASON}")
SLOW, FAST = (Lab(sites=4, across=link) for link in (compression_lab.SLOW, compression_lab.FAST))
TORCH = ("torch plain", "torch fp16", "torch powersgd")


def timed(names, hosts, **seconds):
    """Steps as they were predicted, or as given."""
    found = {
        name: Timed(name, (seconds.get(name.split()[0], 0.01),) * 3, 1e6, 0.5)
        for name in (*names, "one number", "coding alone")
    }
    predicted, sent = compression_lab.predictions(hosts, FLAT, found)
    own = {name: Timed(name, (predicted[name],) * 3, sent[name], 0.5) for name in predicted}
    return Found(hosts, {**found, **own}, predicted, sent)


@pytest.mark.full
def test_figures_of_steps_as_predicted():
    names = (*(one.name for one in FLAT), *TORCH)
    slow, fast = (timed(names, hosts, one=4e-4) for hosts in (SLOW, FAST))
    across, _ = links(SLOW, slow.timed)
    assert across.latency_seconds == pytest.approx(1e-4)  # a quarter of the sum of one number
    gain, fast_gain = lab_figures.gain_figures(slow, fast)
    assert (gain.goal, fast_gain.goal) == (">= 5", "")
    assert gain.ratio > fast_gain.ratio > 1
    assert gain.note.endswith("slower than float32 are: none")
    (off,) = lab_figures.prediction_figures(slow)
    assert (off.ours, off.holds) == (pytest.approx(1), True)
    for found in (slow, fast):
        auto = lab_figures.auto_figure(found)
        assert auto.ratio == 1  # it takes what is predicted to be the fastest
        assert [figure.goal for figure in lab_figures.peer_figures(found, "python")] == ["<= 1"] * 3
        rows = lab_figures.listing(found).rows
        assert [row[0] for row in rows] == [*names, "one number", "coding alone"]


def test_a_step_that_is_far_off_is_named():
    found = timed([one.name for one in FLAT], SLOW)
    slower = Timed("sign", tuple(2 * s for s in found.timed["sign"].seconds), 0.0, 0.5)
    moved = Found(SLOW, {**found.timed, "sign": slower}, found.predicted, found.sent)
    (off,) = lab_figures.prediction_figures(moved)
    assert (off.ours, off.holds) == (pytest.approx(2), False)
    assert off.note.startswith("sign; ")
    (skipped,) = lab_figures.peer_figures(found, None)
    assert skipped.note.startswith("skipped: no torch here")
    assert math.isnan(skipped.ratio)


def test_two_that_do_not_train_the_same_network():
    ours, theirs = Timed("float32", (1.0,), 0, 0.5), Timed("torch plain", (1.0,), 0, 0.6)
    compression_lab.check_losses({"float32": ours})
    with pytest.raises(RunError, match=r"float32 has loss 0\.500000 and torch 0\.600000"):
        compression_lab.check_losses({"float32": ours, "torch plain": theirs})


def test_without_a_lab_there_is_a_reason(monkeypatch):
    monkeypatch.setattr(lab, "unavailable", lambda hosts: "no root")
    (figure,) = report.bench(lab=True).figures
    assert figure.note == "skipped: no root"


def test_the_network_of_the_step():
    params = step.first_params((4, 6, 2))
    assert [params[name]["kernel"].shape for name in params] == [(4, 6), (6, 2)]
    inputs, targets = map(jnp.asarray, step.batch(1, 3, (4, 6, 2)))
    hidden = np.maximum(np.asarray(inputs) @ params["layer0"]["kernel"], 0)
    expected = np.square(hidden @ params["layer1"]["kernel"] - targets).mean()
    assert float(step.loss(params, inputs, targets)) == pytest.approx(float(expected), rel=1e-6)
    grads = jax.grad(step.loss)(params, inputs, targets)
    assert jax.tree.structure(grads) == jax.tree.structure(params)


@live
@pytest.mark.slow
def test_steps_between_two_sites():
    hosts = Lab(sites=2, across=LabLink(200e6))
    chosen = [one for one in FLAT if one.name in ("nothing sent", "sign")]
    found = compression_lab.measure(hosts, chosen, None, 1, warmup=0, steps=1)
    assert set(found.timed) == {"nothing sent", "sign", "one number", "coding alone"}
    assert found.timed["sign"].loss == found.timed["nothing sent"].loss  # before the first update
    assert 1 < found.timed["sign"].sent_bytes / found.sent["sign"] < 1.15
    assert found.predicted["sign"] > found.predicted["nothing sent"] > 0
