from __future__ import annotations

import itertools
from functools import partial

import jax
import numpy as np
import pytest

from benchmarks import overhead
from benchmarks.core.harness import Sample
from benchmarks.core.plain import gpt_loss, mlp_loss
from benchmarks.overhead import GPT, MLP, TINY, LoopPair, StepPair, beyond_figure, experiment
from jaxdist.run.hooks.loop import Log

SMALL_GPT = {
    "model": {"type": "gpt", "layers": 2, "embed": 16, "heads": 2},
    "data": {**GPT["data"], "vocab_size": 11, "window": 8},
    "train": {"steps": 9, "batch_size": 8},
}


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        pytest.param(SMALL_GPT, partial(gpt_loss, vocab_size=11), marks=pytest.mark.slow),
        (TINY, mlp_loss),
    ],
    ids=["gpt", "mlp"],
)
@pytest.mark.full
def test_both_steps_report_the_same_losses_and_gradient_norms(settings, loss):
    ours = experiment(settings)
    steps = StepPair(ours, loss)
    names = ours.program.metrics
    with ours.loader.batches() as batches:
        steps.check(list(itertools.islice(batches, 3)))
    mine = dict(zip(names, np.asarray(steps.ours()).tolist(), strict=True))
    reference = np.asarray(steps.reference())
    np.testing.assert_allclose([mine["loss"], mine["grad_norm"]], reference, rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        pytest.param(SMALL_GPT, partial(gpt_loss, vocab_size=11), marks=pytest.mark.slow),
        (TINY, mlp_loss),
    ],
    ids=["gpt", "mlp"],
)
def test_our_program_does_no_more_than_the_plain_one(settings, loss):
    ours = experiment(settings)
    steps = StepPair(ours, loss)
    with ours.loader.batches() as batches:
        batch = next(batches)
    mine = steps._train.lower(steps._state, batch).compile()
    plain = steps._plain.lower(steps._plain_state, batch).compile()
    assert mine.as_text().count(" all-reduce(") == plain.as_text().count(" all-reduce(")
    for what in ("bytes accessed", "flops"):
        assert mine.cost_analysis()[what] <= 1.02 * plain.cost_analysis()[what] + 4096, what


@pytest.mark.full
def test_steps_that_differ_are_noticed():
    ours = experiment(TINY)
    steps = StepPair(ours, lambda params, batch: 1.01 * mlp_loss(params, batch))
    with ours.loader.batches() as batches, pytest.raises(AssertionError):
        steps.check([next(batches)])


def test_both_sides_of_the_loop_take_the_same_steps():
    tiny = experiment(TINY, devices=1)
    with tiny.loader.batches() as batches, overhead.hooks(tiny) as each_step:
        fixed = next(batches)
        ours, bare = (LoopPair(tiny, tiny.program.train, fixed, 12) for _ in range(2))
        ours.ours(itertools.repeat(fixed), each_step)
        bare.bare()
        assert int(ours._state.step) == int(bare._state.step) == 12
        jax.tree.map(np.testing.assert_array_equal, ours._state.params, bare._state.params)
        (log,) = (hook for hook in each_step.hooks if isinstance(hook, Log))
        assert log.writer is not None
        assert log.writer.path.read_text().count('"split": "train"') == 1  # of step 10


def test_the_busy_step_computes_the_same_as_the_step():
    tiny = experiment(TINY, devices=1)
    busy = overhead.busy_step(tiny, 10)
    with tiny.loader.batches() as batches:
        batch = next(batches)
    expected = tiny.program.train(tiny.program.init(), batch)[1]
    np.testing.assert_allclose(busy(tiny.program.init(), batch)[1], expected, rtol=1e-6)


def test_the_budget_is_seconds_per_step_beyond_the_bare_call():
    figure = beyond_figure("loop", Sample((3.0, 5.0, 9.0)), Sample((1.0, 3.0, 1.0)), 1000, "why")
    assert (figure.ours, figure.reference, figure.goal) == (2e-3, 50e-6, "<= 1")
    assert figure.holds is False
    assert figure.note == "beyond a bare jit call of 1000 us; why"
    assert beyond_figure("loop", Sample((1.04,)), Sample((1.0,)), 1000, "").holds is True


@pytest.mark.slow
def test_the_report_holds_the_five_figures(monkeypatch):
    for name, cheap in (("GPT", TINY), ("gpt_loss", mlp_loss), ("MLP", TINY)):
        monkeypatch.setattr(overhead, name, cheap)
    monkeypatch.setattr(overhead, "BUSY_ITERATIONS", 1)
    report = overhead.bench(repeats=1)
    assert [(figure.name, figure.goal) for figure in report.figures] == [
        ("gpt step, 8 devices", "<= 1.03"),
        ("gpt replicas compared, 8 devices", ""),
        ("mlp step, 8 devices", "<= 1.03"),
        ("loop, per step", "<= 1"),
        ("loop + loader", "<= 1.05"),
    ]


def test_the_sizes_that_are_measured_can_be_built():
    for settings in (GPT, MLP):
        assert experiment(settings).layout.data_size == len(jax.devices())
