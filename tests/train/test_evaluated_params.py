"""Which parameters are evaluated where an optimizer, or a strategy, trains others."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from averages import averaged
from optax import contrib
from programs import build_program, place
from rich.console import Console
from runs import DIGITS, metrics
from test_lookahead import Model, rows, squares

from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.commands.evaluate import open_run
from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.optim.build import ImportedOptimizerConfig, taking_extra
from jaxdist.optim.imported.averages import keeps_average
from jaxdist.run.train import train
from jaxdist.train.evaluate import evaluate

QUIET = Console(quiet=True)
FREE = {"path": "optax.contrib:schedule_free_sgd"}
MEAN = {"path": "averages:averaged", "eval_params": "averages:mean"}


def program(mesh=None, *, zero=0, reduce=None, **settings):
    config = ImportedOptimizerConfig(type="import", learning_rate=0.1, **settings)
    given = {"zero": zero, "reduce": reduce}
    return build_program(Model, squares, config, rows(0), mesh or {"data": 1}, **given)


def trained(found, steps=3):
    state = found.init()
    for step in range(steps):
        state, _ = found.train(state, place(found, rows(step)))
    return state


def evaluated(found, state):
    return np.asarray(found.home.used.params(found.evaluated(state))["w"])


def test_a_schedule_free_optimizer_has_its_average_evaluated():
    found = program(**FREE, skip_nonfinite=True, clip_norm=1.0)
    state = trained(found)
    inner = optax.tree.get_all_with_path(state.opt_state, "z")[0][1]
    expected = (state.params["w"] - 0.1 * inner["w"]) / 0.9
    np.testing.assert_allclose(evaluated(found, state), expected, rtol=1e-6)
    assert np.abs(expected - state.params["w"]).max() > 1e-3


def test_narrow_parameters_have_the_average_of_their_master_weights_evaluated():
    found = program(**FREE, master_weights="bfloat16")
    state = trained(found)
    z, y = state.opt_state.inner.z["w"], state.opt_state.master["w"]
    expected = ((y - 0.1 * z) / 0.9).astype(jnp.bfloat16)
    np.testing.assert_array_equal(evaluated(found, state), expected)


@pytest.mark.full
@pytest.mark.parametrize("settings", [FREE, MEAN], ids=["schedule-free", "average"])
def test_every_plan_evaluates_the_same(settings):
    """Neither 3 nor 5 divides by 4: zeros fill up the shards."""
    one, found = program(**settings), program({"data": 4}, zero=3, reduce=Ring(), **settings)
    ours, theirs = (evaluated(each, trained(each)) for each in (found, one))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_an_average_of_one_s_own_is_evaluated():
    found = program(**MEAN)
    state = trained(found)
    np.testing.assert_array_equal(evaluated(found, state), state.opt_state.mean["w"])


def test_what_is_no_tree_of_parameters_is_refused():
    found = program(path="averages:averaged", eval_params="averages:first")
    with pytest.raises(ConfigError, match=r"averages:first gives an array \[3, 5\], but the param"):
        jax.eval_shape(found.evaluated, found.state_shapes)


AVERAGES = {
    "adam": (optax.adam(1e-3), False),
    "dog": (contrib.dog(1e-3), False),
    "schedule_free": (contrib.schedule_free_sgd(1e-3), True),
    "average": (averaged(1e-3), True),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_is_a_copy_that_moves(name):
    made, expected = AVERAGES[name]
    assert keeps_average(taking_extra(made), {"a": jnp.ones(3), "b": jnp.ones(2)}) is expected


def experiment(**sections):
    values = {**DIGITS, "mesh": {"data": 1}, **sections}
    return build(validate(Document(values), ExperimentConfig), devices=jax.devices()[:1])


def optim(**settings):
    return {"optim": {"type": "import", "learning_rate": 0.1, **settings}}


def test_an_average_that_is_not_evaluated_is_told():
    (notice,) = experiment(**optim(path="averages:averaged")).notices
    assert "averages:averaged keeps a second copy of the parameters" in notice
    assert "set optim.eval_params" in notice
    for settings in (MEAN, FREE, {"path": "optax:adam"}):
        assert experiment(**optim(**settings)).notices == ()


def test_narrow_parameters_without_a_master_copy_are_told():
    given = {
        "model": {"type": "import", "path": "narrow_model:Model"},
        "loss": {"type": "classification"},
    }
    (notice,) = experiment(**given).notices
    assert "parameter b and 1 more is bfloat16 without a float32 copy" in notice
    assert "smaller than 0.0039 of a value" in notice
    assert "Set optim.master_weights: bfloat16" in notice
    masters = {**DIGITS["optim"], "master_weights": "bfloat16"}
    assert experiment(**given, optim=masters).notices == ()


def test_parts_of_a_state_must_hold_what_is_evaluated():
    parts = {"checkpoint": {"parts": ["params"]}}
    with pytest.raises(
        ConfigError, match="do not include opt_state, from which optim computes the"
    ):
        experiment(**optim(**FREE), **parts)
    whole = {"checkpoint": {"parts": ["params", "opt_state"]}}
    assert experiment(**optim(**FREE), **whole)
    with pytest.raises(ConfigError, match="do not include outer, from which strategy computes the"):
        experiment(strategy={"type": "lookahead"}, **parts)


def test_servers_refuse_what_workers_do_not_evaluate():
    with pytest.raises(ConfigError, match="evaluates other parameters than it trains"):
        experiment(**optim(**FREE), strategy={"type": "parameter_server", "workers": 2})


def test_slow_weights_and_an_average_are_refused_together():
    with pytest.raises(ConfigError, match="slow weights, but this optimizer evaluates its average"):
        experiment(**optim(**FREE), strategy={"type": "lookahead"})


def test_a_run_and_its_checkpoint_evaluate_the_average(tmp_path, monkeypatch):
    """Held-out losses of the run and of `eval`; that of the trained parameters is another."""
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    values = {
        **DIGITS, **optim(**FREE), "mesh": {"data": 8}, "eval": {"every": 4},
        "train": {"steps": 4, "batch_size": 64, "log_every": 1}, "checkpoint": {"every": 4},
    }  # fmt: skip
    Path("config.yaml").write_text(json.dumps(values))
    folder = train(Path("config.yaml"), ["run.directory=whole"], console=QUIET).directory
    (during,) = [line["loss"] for line in metrics(folder) if line["split"] == "heldout"]
    made, restored = open_run(folder, [], step=None, console=QUIET)
    state = restored.state
    with made.heldout.evaluation_batches() as batches:
        rows_of = list(batches)
    losses = [
        evaluate(made.program, params, state.buffers, rows_of)["loss"]
        for params in (made.program.evaluated(state), state.params)
    ]
    assert during == pytest.approx(losses[0], rel=1e-5)
    assert abs(losses[1] - losses[0]) > 1e-4
