"""Recommenders: tables on one device and over an axis, losses, AUC and RMSE."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import Document, validate
from jaxdist.data.values import Allowed
from jaxdist.errors import ConfigError, DataError
from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.models.mean import Ranking, RootMean, auc
from jaxdist.models.recommend.lookup import capacity, exchanged_bytes
from jaxdist.models.recommend.rows import RowForm
from jaxdist.train.evaluate import evaluate

_DATA = {"type": "clicks", "fields": 4, "ids": 64, "examples": 512, "heldout_examples": 60}
_SECTIONS: dict[str, Any] = {
    "model": {"type": "dlrm", "width": 8, "bottom": [8], "top": [8], "penalty": 0.01},
    "data": {**_DATA, "skew": 0.5, "dense": 3},
    "optim": {
        "type": "sgd",
        "momentum": 0.0,
        "learning_rate": 0.5,
        "schedule": {"type": "constant"},
    },
    "train": {"steps": 3, "batch_size": 64},
}


def _experiment(devices: int, **sections: Any) -> Experiment:
    document = Document({**_SECTIONS, **sections})
    config = validate(document, ExperimentConfig)
    return build(config, document, devices=jax.devices()[:devices])


def _trained(experiment: Experiment) -> tuple[Any, list[Any], dict[str, float]]:
    program, state, metrics = experiment.program, experiment.program.init(), []
    for step in range(3):
        state, values = program.train(state, experiment.loader.batch(step))
        metrics.append(np.asarray(values))
    assert experiment.heldout is not None
    with experiment.heldout.evaluation_batches() as batches:
        heldout = evaluate(program, program.evaluated(state), state.buffers, batches)
    return jax.tree.map(np.asarray, state.params), metrics, heldout


@pytest.fixture(scope="module")
def one_device() -> tuple[Any, list[Any], dict[str, float]]:
    return _trained(_experiment(1, mesh={"data": 1}))


@pytest.mark.parametrize(
    ("mesh", "rules"),
    [
        pytest.param({"data": 8}, {}, marks=pytest.mark.slow),
        pytest.param({"data": 8}, {"rows": "data"}, marks=pytest.mark.full),
        ({"data": 2, "tensor": 2}, {"rows": "data"}),
        ({"data": 2, "tensor": 2}, {"rows": "tensor"}),
    ],
)
@pytest.mark.every(2)
def test_tables_over_an_axis_equal_one_device(
    mesh: dict[str, int], rules: dict[str, str], one_device: tuple[Any, list[Any], dict[str, float]]
) -> None:
    devices = int(np.prod([*mesh.values()]))
    found = _trained(_experiment(devices, mesh=mesh, sharding={"rules": rules}))
    for one, other in zip(jax.tree.leaves(one_device[:2]), jax.tree.leaves(found[:2]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert found[2] == pytest.approx(one_device[2], rel=1e-5)
    assert set(found[2]) == {"loss", "log_loss", "auc"}


@pytest.mark.full
def test_ids_that_all_lie_on_one_device_take_the_path_with_room_for_all() -> None:
    """Fields of 16 ids lie together on the first device of eight, which no `capacity` foresees."""
    data = {**_DATA, "ids": 16, "skew": 0.1}
    alone, spread = (
        _trained(_experiment(n, mesh={"data": n}, data=data, sharding=rules))
        for n, rules in ((1, {}), (8, {"rules": {"rows": "data"}}))
    )
    assert capacity(32, 8) < 16
    for one, other in zip(jax.tree.leaves(alone[0]), jax.tree.leaves(spread[0]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_lookup_sends_what_the_formula_says() -> None:
    program = _experiment(8, mesh={"data": 8}, sharding={"rules": {"rows": "data"}}).program
    text = program.train.lower(program.state_shapes, program.batch).compile().as_text()
    branches = [line for line in text.splitlines() if " all-to-all(" in line]
    room, whole = (exchanged_bytes(32, 8, 8) // 7, 32 * (4 + 8 * 8))
    assert sum(map(_all_to_all_bytes, branches)) == 8 * (room + whole)
    # No collective carries a table, whose gradient stays where its rows are.
    assert "f32[256,8]" not in "".join(
        line for line in text.splitlines() if " all-reduce(" in line or " all-gather(" in line
    )


def _all_to_all_bytes(line: str) -> int:
    shapes = line.split(" all-to-all(")[0]
    found = re.findall(r"[sf]32\[([\d,]+)\]", shapes)
    return sum(4 * int(np.prod([int(n) for n in one.split(",")])) for one in found)


def test_initial_rows_are_the_same_bits_everywhere() -> None:
    form = RowForm({"user": 300, "item": 100}, 5, 0.1, zeros=1)
    assert form.rows == 512
    assert form.offsets.tolist() == [0, 300]
    rows = np.arange(form.rows, dtype=np.uint32)
    on_host = form.initial(np.uint32(7), rows)
    compiled = jax.jit(lambda seed: form.initial(seed, jnp.asarray(rows), jnp))(jnp.uint32(7))
    np.testing.assert_array_equal(on_host, np.asarray(compiled))
    np.testing.assert_array_equal(form.initial(np.uint32(7), rows[17:19]), on_host[17:19])
    assert (on_host[:, -1] == 0).all()
    factors = on_host[:, :-1]
    assert abs(factors.mean()) < 0.01
    assert factors.std() == pytest.approx(0.1 / np.sqrt(3), rel=0.05)
    assert (form.initial(np.uint32(8), rows) != on_host)[:, :-1].mean() > 0.99


def test_auc_is_that_of_all_pairs_with_ties_and_weights() -> None:
    random = np.random.default_rng(0)
    score, label = random.integers(0, 9, 40).astype(np.float32), random.integers(0, 2, 40)
    weight = random.integers(0, 3, 40).astype(np.float32)
    better = (score[:, None] > score[None]) + 0.5 * (score[:, None] == score[None])
    pairs = np.outer(weight * label, weight * (1 - label))
    assert auc(score, label, weight) == pytest.approx((better * pairs).sum() / pairs.sum())
    parts = [Ranking(score[at], label[at], weight[at]) for at in (slice(0, 9), slice(9, 40))]
    assert Ranking.value(parts) == auc(score, label, weight)
    assert np.isnan(auc(score, np.ones(40), weight))
    assert RootMean.value([RootMean(3.0, 1.0), RootMean(5.0, 1.0)]) == 2.0  # type: ignore[arg-type]
    assert np.isnan(RootMean.value([RootMean(0.0, 0.0)]))  # type: ignore[arg-type]


def test_an_id_without_a_row_is_named_with_table_and_example() -> None:
    allowed = Allowed(tables={"user": 10, "item": 5})
    ids = np.array([[9, 4], [3, 5]])
    with pytest.raises(DataError, match=r"'ids'\[1\] of example 8 .* is 5.*'item' has rows 0 to 4"):
        allowed.check({"ids": ids}, np.array([7, 8]))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"type": "mf", "width": 4}}, "embeddings of two fields"),
        ({"model": {"type": "mf", "width": 4}, "data": {**_DATA, "fields": 2, "dense": 1}}, "two"),
        ({"data": {"type": "images", "source": "digits"}}, "needs ids of categorical fields"),
        ({"data": {**_DATA, "ids": 2**31 - 1}}, "at most"),
        ({"loss": {"type": "classification"}}, "loss.type"),
    ],
)
def test_models_that_do_not_fit_the_data_are_refused(
    sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _experiment(1, mesh={"data": 1}, **sections)
