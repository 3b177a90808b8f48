"""Parts of a state, saved and as the beginning of another run, on other meshes too."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from programs import build_program, place

from jaxdist.checkpoint.parts import BeginWith
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.errors import CheckpointError, ConfigError
from jaxdist.models.loss import Mean
from jaxdist.optim.build import AdamWConfig
from jaxdist.optim.schedules import ScheduleConfig
from jaxdist.run.checkpoints import restore, save
from jaxdist.run.loading.begin import begin_with
from jaxdist.trees import flatten_with_names

CONSTANT = ScheduleConfig(type="constant")
OPTIM = AdamWConfig(type="adamw", learning_rate=0.1, schedule=CONSTANT)
ROWS = 8


class Model(nnx.Module):
    def __init__(self, rngs, classes=5):
        self.encoder = nnx.Param(jax.random.normal(rngs.params(), (3, 6)), dims=("embed", "mlp"))
        self.head = nnx.Param(jax.random.normal(rngs.params(), (6, classes)), dims=("mlp", None))

    def __call__(self, x):
        return jnp.tanh(x @ self.encoder[...]) @ self.head[...]


def squares(module, batch):
    each = jnp.square(module(batch["x"])).sum(-1)
    return {"loss": Mean((each * batch["weight"]).sum(), batch["weight"].sum())}


def rows():
    random = np.random.default_rng(0)
    return {"x": random.normal(size=(ROWS, 3)).astype(np.float32)}


@cache
def program(devices=1, classes=5, optim=OPTIM, **plan):
    model = partial(Model, classes=classes)
    return build_program(model, squares, optim, rows(), {"data": devices}, **plan)


@cache
def trained():
    found = program(4, zero=3)
    state = found.init()
    for _ in range(3):
        state, _ = found.train(state, place(found, rows()))
    return found, state


def named(found, state):
    """The model's own arrays by name."""
    return {n: np.asarray(x) for n, x in flatten_with_names(found.home.used(state))}


def saved(path: Path, parts=None) -> Path:
    found, state = trained()
    store = CheckpointStore(
        path / "checkpoints", keep=2, keep_best=False, chunk_bytes=64, on_event=pytest.fail
    )
    with store:
        save(store, found, state, parts=parts)
    return path


@pytest.mark.parametrize("plan", [{}, {"devices": 2, "zero": 1}, {"devices": 8, "zero": 3}])
@pytest.mark.every(3)
def test_a_run_begins_with_parameters_alone_on_any_plan(tmp_path, plan):
    begin = BeginWith(run=str(saved(tmp_path)))
    found = program(**plan)
    state, step = begin_with(found, begin, say=pytest.fail)
    assert step == 3
    expected, fresh, ours = named(*trained()), named(found, found.init()), named(found, state)
    for name, array in ours.items():
        theirs = expected if name.startswith("params") else fresh
        np.testing.assert_array_equal(array, theirs[name])
    assert ours["step"] == 0
    shapes = jax.tree.leaves(found.state_shapes)
    assert [x.sharding for x in jax.tree.leaves(state)] == [s.sharding for s in shapes]
    found.train(state, place(found, rows()))  # its memory is its own


@pytest.mark.full
def test_an_encoder_under_another_head(tmp_path):
    saved(tmp_path)
    found = program(classes=7)
    for parts in (("params/enc*",), ("params", "!params/head")):
        state, _ = begin_with(found, BeginWith(run=str(tmp_path), parts=parts), say=pytest.fail)
        ours, fresh = named(found, state), named(found, found.init())
        np.testing.assert_array_equal(ours["params/encoder"], named(*trained())["params/encoder"])
        np.testing.assert_array_equal(ours["params/head"], fresh["params/head"])
    with pytest.raises(CheckpointError) as caught:
        begin_with(found, BeginWith(run=str(tmp_path)), say=pytest.fail)
    assert "params/head: saved float32[6,5], expected float32[6,7]" in str(caught.value)
    assert "leave out the arrays that do not fit, for example with '!params/head'" in str(
        caught.value
    )
    assert str(tmp_path) in str(caught.value)


def test_moments_may_come_along_and_the_step_never_does(tmp_path):
    saved(tmp_path)
    begin = BeginWith(run=str(tmp_path), parts=("params", "opt_state"))
    state, _ = begin_with(program(), begin, say=pytest.fail)
    ours, expected = named(program(), state), named(*trained())
    assert ours.pop("step") == 0
    assert expected["step"] == 3
    for name, array in ours.items():
        np.testing.assert_array_equal(array, expected[name])


def test_copies_of_parameters_are_made_of_those_that_were_taken(tmp_path):
    """Master weights would else carry the drawn parameters back at the first step."""
    optim = AdamWConfig(
        type="adamw", learning_rate=0.1, schedule=CONSTANT, master_weights="bfloat16"
    )
    found = program.__wrapped__(optim=optim)  # its rates are a mapping, which has no hash
    with CheckpointStore(
        tmp_path / "checkpoints", keep=1, keep_best=False, on_event=pytest.fail
    ) as store:
        state, _ = found.train(found.init(), place(found, rows()))
        save(store, found, state)
        expected = named(found, state)
    ours = named(found, begin_with(found, BeginWith(run=str(tmp_path)), say=pytest.fail)[0])
    for leaf in ("encoder", "head"):
        np.testing.assert_array_equal(ours[f"params/{leaf}"], expected[f"params/{leaf}"])
        (master,) = [x for n, x in ours.items() if n.endswith(f"master/{leaf}")]
        np.testing.assert_array_equal(master, expected[f"params/{leaf}"].astype(np.float32))


def test_a_part_is_saved_begun_with_and_not_resumed(tmp_path):
    saved(tmp_path, parts=("!opt_state",))
    found = program()
    state, _ = begin_with(found, BeginWith(run=str(tmp_path)), say=pytest.fail)
    np.testing.assert_array_equal(
        named(found, state)["params/head"], named(*trained())["params/head"]
    )
    store = CheckpointStore(tmp_path / "checkpoints", keep=1, keep_best=False, on_event=pytest.fail)
    with store, pytest.raises(CheckpointError) as caught:
        restore(store, found)
    for part in [
        "contains only a part of the training state",
        "opt_state/",
        "checkpoint.begin_with",
    ]:
        assert part in str(caught.value)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"elsewhere is not a run with checkpoints"):
        begin_with(program(), BeginWith(run=str(tmp_path / "elsewhere")), say=pytest.fail)
    assert not (tmp_path / "elsewhere").exists()
    saved(tmp_path)
    with pytest.raises(
        ConfigError, match=r"encoder: this run's state has no array .*params/encoder"
    ):
        begin_with(program(), BeginWith(run=str(tmp_path), parts=("encoder",)), say=pytest.fail)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9; .*\[3\]"):
        begin_with(program(), BeginWith(run=str(tmp_path), step=9), say=pytest.fail)
