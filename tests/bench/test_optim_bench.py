"""The bench of optimizers: every figure is there, counts are the compiled program's own."""

import math
from functools import partial

import optax
import pytest

from jaxdist.bench import optim as bench_optim
from jaxdist.bench.optim import Step, lamb_figures, lars_figures, sharded_figures
from jaxdist.bench.shapes import bert_base, resnet50
from jaxdist.optim.lamb import lamb

SMALL = {"layer/kernel": (256, 128), "layer/bias": (128,), "head": (128, 64)}


@pytest.mark.parametrize(
    ("shapes", "tensors", "parameters"),
    [(bert_base(), 199, 109_482_240), (resnet50(), 161, 25_557_032)],
)
def test_the_models_have_their_published_sizes(shapes, tensors, parameters):
    assert len(shapes) == tensors
    assert sum(map(math.prod, shapes.values())) == parameters


def test_figures_of_lamb():
    figures = {figure.name: figure for figure in lamb_figures("m", SMALL, repeats=1, goals=True)}
    assert figures["m: LAMB traffic"].ours < 54
    assert figures["m: LAMB temporaries"].ratio < 0.25
    assert [figure.goal for figure in figures.values()] == [
        "<= 0.4",
        "<= 1.8",
        "",
        "<= 1.3",
        "<= 1",
    ]


def test_figures_of_lars():
    figures = {figure.name: figure for figure in lars_figures("m", SMALL, repeats=1)}
    assert 35 < figures["m: LARS traffic"].ours < 37
    assert figures["m: LARS over optax.lars"].ours > 0


def test_a_step_moves_its_parameters():
    with Step(optax.sgd(1.0), SMALL) as step:
        before = float(step.state[0]["head"][0, 0])
        step()
        assert float(step.state[0]["head"][0, 0]) == pytest.approx(0.99 * before)


def test_sharded_lamb_has_one_more_collective(devices):
    count, payload = sharded_figures(SMALL)
    assert (count.ours, payload.ours, payload.reference) == (1, 16, 24)


def test_an_optimizer_with_a_norm_of_its_own_is_found_out(devices, monkeypatch):
    monkeypatch.setattr(bench_optim, "lamb", partial(lamb, variant="apex"))
    count, _ = sharded_figures(SMALL)
    assert (count.ours, count.holds) == (2, False)
