"""The bench of optimizers: every figure is there, counts are the compiled program's own."""

import math
import subprocess
from functools import partial

import optax
import pytest

from benchmarks import muon
from benchmarks import optim as bench_optim
from benchmarks.core.shapes import bert_base, resnet50
from benchmarks.optim import OptimizerStep, counted, sharded_figures, timed
from jaxdist.errors import RunError
from jaxdist.optim.lamb import lamb

SMALL = {"layer/kernel": (256, 128), "layer/bias": (128,), "head": (128, 64)}


@pytest.mark.parametrize(
    ("shapes", "tensors", "parameters"),
    [(bert_base(), 199, 109_482_240), (resnet50(), 161, 25_557_032)],
)
def test_the_models_have_their_published_sizes(shapes, tensors, parameters):
    assert len(shapes) == tensors
    assert sum(map(math.prod, shapes.values())) == parameters


@pytest.mark.slow
def test_bytes_and_temporaries_are_the_compiled_steps_own():
    figures = {figure.name: figure for figure in counted()}
    assert 52 < figures["BERT-base: LAMB traffic"].ours < 53.5
    assert 52 < figures["ResNet-50: LAMB traffic"].ours < 53.5
    assert 35 < figures["BERT-base: LARS traffic"].ours < 37
    assert figures["BERT-base: LAMB temporaries"].ratio < 0.4
    assert figures["ResNet-50: LARS temporaries"].ratio < 0.01


@pytest.mark.slow
def test_times_have_goals_where_a_loop_of_your_own_runs_them():
    plain, huge = (timed(1, suffix, bert=SMALL, resnet=SMALL) for suffix in ("", "huge pages"))
    assert [figure.goal for figure in plain] == [
        "<= 0.4",
        "<= 1.8",
        "<= 0.25",
        "<= 0.4",
        "<= 0.25",
        "",
    ]
    assert not any(figure.goal for figure in huge)
    assert [figure.name + ", huge pages" for figure in plain] == [figure.name for figure in huge]
    assert all(figure.ours > 0 and figure.reference > 0 for figure in plain)


def test_the_plain_process_has_no_tunables_and_is_heard_when_it_fails(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    seen = {}

    def run(command, env, **_):
        seen.update(env=env, command=command)
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nValueError: no shapes")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RunError, match="exit code 1: ValueError: no shapes"):
        bench_optim._in_plain_process(1)
    assert "GLIBC_TUNABLES" not in seen["env"]


def test_a_step_moves_its_parameters():
    with OptimizerStep(optax.sgd(1.0), SMALL) as step:
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


@pytest.mark.slow
def test_muon_sends_its_formula_and_computes_one_copy():
    found = muon.figures(["ZeRO 2 and tensor, 6 layers over 8"])
    assert [figure.ratio for figure in found] == [1.0, 1.0]
