"""Layers lie where their stage is, in checkpoints in the model's order; no step moves them."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from pipeline_configs import TOKENS, config_of, drawn, experiment, same, trained
from programs import put_state

from jaxdist.experiment import build
from jaxdist.hlo.ledger import ledger
from jaxdist.optim.build import ImportedOptimizerConfig
from jaxdist.parallel.pipeline.model.chunks import on_stages
from jaxdist.parallel.pipeline.model.stack import StageStack, is_in_order

LOOP, V = (0, 1, 2, 3, 0, 1, 2, 3), (0, 1, 2, 3, 3, 2, 1, 0)
CHUNKS = {"schedule": {"type": "interleaved", "chunks": 3}}


@cache
def alone():
    """The state that one device draws, and what it comes to."""
    one = experiment({"data": 1})
    begun = drawn(one)
    return begun, trained(one, begun)


def mesh_of(**sizes):
    devices = np.array(jax.devices()[: int(np.prod([*sizes.values()]))])
    axes = (AxisType.Auto,) * len(sizes)
    return jax.sharding.Mesh(devices.reshape([*sizes.values()]), tuple(sizes), axis_types=axes)


@pytest.mark.parametrize("placement", [LOOP, V])
@pytest.mark.parametrize("layers", [8, 16])
def test_each_stage_holds_the_layers_of_its_chunks(placement, layers):
    mesh = mesh_of(stage=4, data=2)
    whole = np.arange(layers * 6, dtype=np.float32).reshape(layers, 6)
    sharding = NamedSharding(mesh, PartitionSpec("stage", "data"))
    stack = StageStack(mesh, "stage", placement)
    stored = stack.store(jax.device_put(whole, sharding))
    assert stored.sharding.is_equivalent_to(sharding, 2)
    chunks = whole.reshape(8, -1, 6)
    np.testing.assert_array_equal(
        np.asarray(stored), chunks[list(on_stages(placement))].reshape(whole.shape)
    )
    np.testing.assert_array_equal(np.asarray(stack.restore(stored)), whole)


def test_the_order_of_one_chunk_a_stage_is_the_model_s():
    assert is_in_order((0, 1, 2))
    assert not is_in_order(LOOP)
    assert not is_in_order(V)


def test_putting_in_order_takes_a_stage_s_share_and_not_the_stack():
    mesh = mesh_of(stage=8)
    sharding = NamedSharding(mesh, PartitionSpec("stage"))
    stack = StageStack(mesh, "stage", (*range(8), *range(8)))
    x = jax.ShapeDtypeStruct((16, 256, 64), jnp.float32, sharding=sharding)
    compiled = jax.jit(stack.store, out_shardings=sharding).lower(x).compile()
    memory = compiled.memory_analysis()
    share = 16 * 256 * 64 * 4 // 8
    assert memory.argument_size_in_bytes == share
    assert memory.temp_size_in_bytes < 4.1 * share


@pytest.mark.full
def test_a_step_sends_no_layers():
    """What goes from stage to stage is smaller than one layer's smallest matrix."""
    made = experiment({"stage": 2}, CHUNKS, data={**TOKENS, "window": 2})
    program = made.program
    assert program.compute.stack is not None
    compiled = program.train.lower(program.state_shapes, program.batch).compile()
    rows, window, width, layer_matrix = 4, 2, 32, 32 * 32 * 4
    sent = ledger(compiled, program.layout.mesh).collectives
    moved = [c.payload_bytes for c in sent if c.kind != "all-reduce"]
    assert {c.kind for c in sent} == {"collective-permute", "all-reduce"}
    assert max(moved) == rows * window * width * 4 < layer_matrix


@pytest.mark.slow
def test_the_state_in_the_model_s_order_is_that_of_one_device():
    made = experiment({"stage": 2}, CHUNKS)
    found, (expected, _) = made.program.init(), alone()
    used = made.program.home.used(found)
    # Two programs draw them, whose loops may round otherwise.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), *map(host, (used, expected)))
    stored = made.program.home.stored(used)
    jax.tree.map(np.testing.assert_array_equal, *map(host, (stored, found)))
    kernels = [host(state).params["blocks"]["mlp"]["up"] for state in (found, used)]
    np.testing.assert_array_equal(kernels[0], kernels[1][[0, 2, 4, 1, 3, 5]])
    shapes = made.program.state_shapes
    assert jax.tree.all(
        jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s.sharding, x.ndim), stored, shapes)
    )


@pytest.mark.slow
def test_every_split_stays_as_it_is():
    made = experiment({"data": 2, "stage": 2, "tensor": 2}, CHUNKS)
    program = made.program
    begun, _ = alone()
    moved = program.home.to_files(put_state(program, begun))
    for state in (moved, program.home.from_files(moved)):
        jax.tree.map(
            lambda x, s: check(x.sharding.is_equivalent_to(s.sharding, x.ndim)),
            state,
            program.state_shapes,
        )


@pytest.mark.slow
def test_layers_that_are_whole_on_every_stage_keep_the_model_s_order():
    whole = experiment({"stage": 2}, CHUNKS, sharding={"rules": {"layers": None}})
    assert whole.program.compute.stack is None
    begun, expected = alone()
    same(trained(whole, begun), expected)


def with_optimizer(path, pipeline, *, layers=6, **args):
    """The small decoder on two stages with another optimizer."""
    optim = ImportedOptimizerConfig(type="import", path=path, args=args, learning_rate=1e-3)
    stages = 1 if pipeline is None else 2
    config = config_of({"stage": stages}, pipeline or {}, model={"layers": layers})
    return build(config.model_copy(update={"optim": optim}), devices=jax.devices()[:stages])


@pytest.mark.slow
def test_a_factored_statistic_counts_layers_in_the_order_of_its_parameter():
    program = with_optimizer("optax:adafactor", CHUNKS, min_dim_size_to_factor=8).program
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda s: rng.uniform(size=s.shape).astype(s.dtype), program.own_shapes)
    stored = program.home.stored(state)
    rows = [optax.tree.get(s.opt_state, "v_row")["blocks"]["mlp"]["up"] for s in (state, stored)]
    np.testing.assert_array_equal(rows[1], rows[0][[0, 2, 4, 1, 3, 5]])
    jax.tree.map(np.testing.assert_array_equal, program.home.used(stored), state)


@pytest.mark.slow
def test_a_rule_for_matrices_sees_single_layers_on_every_stage():
    """The order in which stages hold layers is not the model's."""
    begun, _ = alone()
    plans = with_optimizer("optax.contrib:muon", CHUNKS), with_optimizer("optax.contrib:muon", None)
    found, expected = (trained(made, begun_for(made, begun)) for made in plans)
    same(found, expected)


def begun_for(made, begun):
    """A state with these parameters, and the optimizer's own first state."""
    first = made.program.optimizer.transform.init(begun.params)
    return replace(begun, opt_state=jax.tree.map(np.asarray, first))


@pytest.mark.full
def test_a_vector_as_long_as_the_stack_is_not_taken_for_its_layers():
    """SM3 keeps a vector for each dim of a layer: with 4 layers and 4 heads two have 4 elements."""
    halves = {"schedule": {"type": "interleaved", "chunks": 2}}
    program = with_optimizer("pipeline_parts:sm3", halves, layers=4).program
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda s: rng.uniform(size=s.shape).astype(s.dtype), program.own_shapes)
    key = [jax.tree.leaves(s.opt_state[0].mu["blocks"]["attention"]["key"])
           for s in (state, program.home.stored(state))]  # fmt: skip
    assert [vector.shape for vector in key[0]] == [(4, 32), (4, 4), (4, 8)]
    for own, stored in zip(*key, strict=True):
        np.testing.assert_array_equal(stored, own[[0, 2, 1, 3]])


def check(holds):
    assert holds


def host(tree):
    return jax.tree.map(np.asarray, tree)
