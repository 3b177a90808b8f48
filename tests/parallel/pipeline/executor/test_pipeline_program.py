"""What the compiled step of a pipeline holds, computes and sends."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from pipeline_models import LAYERS, LENGTH, MODELS, ROWS, D, compiled, executable, on_mesh
from pipeline_tables import TABLES

from jaxdist.parallel.pipeline.executor.execute import run_pipeline
from jaxdist.parallel.pipeline.executor.lower import lower
from jaxdist.parallel.pipeline.executor.model_fns import GradientsAndSums, ModelFns
from jaxdist.parallel.pipeline.executor.stage import StageContext
from jaxdist.parallel.pipeline.executor.ticks import NONE

STAGES = 4
FORWARD_FLOPS = 2 * 2 * ROWS * LENGTH * D * D * LAYERS // STAGES
"""Of one microbatch in one stage of the small model: two matmuls a layer."""


@cache
def step(table, microbatches, policy="recompute"):
    ticks = lower(TABLES[table](STAGES, microbatches), activations=policy)
    return ticks, compiled("mlp", ticks, on_mesh({"stage": STAGES}))


@pytest.mark.parametrize(("table", "policy"), [("1f1b", "recompute"), ("eager", "stash")])
@pytest.mark.every(2)
def test_memory_is_flat_in_the_number_of_microbatches(table, policy):
    few, many = (step(table, m, policy)[1].memory.temp_bytes for m in (8, 32))
    assert many == pytest.approx(few, rel=0.05)


@pytest.mark.full
def test_memory_of_gpipe_grows_with_them():
    few, many = (step("gpipe", m)[1].memory.temp_bytes for m in (8, 32))
    assert many > 1.8 * few


@pytest.mark.parametrize(
    ("table", "policy", "forward", "backward"),
    [
        ("eager", "recompute", 1, 3),
        ("eager", "stash", 1, 2),
        ("zb_h1", "stash", 1, 1),
    ],
)
@pytest.mark.every(3)
def test_a_task_computes_what_the_model_does_and_nothing_else_is_computed(
    table, policy, forward, backward
):
    """In forward passes; of the halves of a backward pass, the dearer one."""
    ticks, found = step(table, 8, policy)
    assert found.flops_high == ticks.ticks * (forward + backward) * FORWARD_FLOPS
    # All of it stands under conditionals.
    assert found.flops_low == 0
    per_stage = [(work.kind != NONE).sum(axis=0) for work in (ticks.forward, ticks.backward)]
    assert (per_stage[0] == 8).all()
    assert (per_stage[1] == (16 if table == "zb_h1" else 8)).all()


@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_no_stage_computes_in_its_bubble(microbatches):
    """Executed over model work, counted while it runs: the usual scan has 1.75 at m = p = 4."""
    ran = []

    def blocks(params, x, visit):
        jax.debug.callback(lambda chunk: ran.append(int(chunk)), visit.chunk)
        return jnp.tanh(x * params)

    def head(shared, x, visit):
        return jnp.sum(x * shared), jnp.sum(x * shared)

    parts = ModelFns(lambda shared, visit: visit.rows * shared, blocks, head)
    ticks = lower(TABLES["eager"](STAGES, microbatches))
    staged, everywhere = PartitionSpec("stage"), PartitionSpec()
    function = jax.shard_map(
        lambda *given: run_pipeline(StageContext(ticks, parts, *given, "stage")),
        mesh=on_mesh({"stage": STAGES}).mesh,
        in_specs=(staged, everywhere, everywhere),
        out_specs=GradientsAndSums(staged, everywhere, everywhere),
        check_vma=False,
    )
    given = jnp.ones(STAGES), jnp.float32(1), jnp.ones((microbatches, 2))
    jax.block_until_ready(jax.jit(function)(*given))
    jax.effects_barrier()
    # Each chunk but the last forward, and each once more in its backward pass.
    model = microbatches * (2 * STAGES - 1)
    assert len(ran) == model
    assert np.bincount(ran).tolist() == [2 * microbatches] * (STAGES - 1) + [microbatches]


def test_what_is_sent():
    """Activations right and gradients left in ticks that have them, and shared gradients once."""
    ticks, found = step("gpipe", 8)
    boundary = ROWS * LENGTH * D * 4
    moved = [c for c in found.collectives if c.kind == "collective-permute"]
    assert [(c.payload_bytes, c.times_low, c.times_high) for c in moved] == [
        (boundary, 0, ticks.ticks)
    ] * 2
    _, found = step("eager", 8)
    moved = [c for c in found.collectives if c.kind == "collective-permute"]
    assert [(c.payload_bytes, c.times_low) for c in moved] == [(boundary, 14)] * 2
    reduced = [c for c in found.collectives if c.kind == "all-reduce"]
    assert all(c.axes == ("stage",) and c.times_high == 1 for c in reduced)


@pytest.mark.parametrize(("table", "waits"), [("1f1b", True), ("eager", False)])
def test_where_tasks_take_turns_nothing_is_sent_before_the_tick_ends(table, waits):
    """Or a stage that goes backward would first wait for its neighbour's forward task."""
    ticks = lower(TABLES[table](STAGES, 8), activations="stash")
    assert ticks.paired is not waits
    text = executable("mlp", ticks, on_mesh({"stage": STAGES})).as_text()
    body = next(part for part in text.split("\n\n") if "collective-permute(" in part)
    operations = re.findall(r"(collective-permute|conditional)\(", body)
    assert (operations.index("collective-permute") == operations.count("conditional")) is waits


@pytest.mark.slow
@pytest.mark.needs_libtpu
def test_a_tpu_program_with_tensor_collectives_in_conditionals(tpu_devices):
    ticks = lower(TABLES["eager"](2, 4))
    layout = on_mesh({"stage": 2, "data": 2, "tensor": 2}, tpu_devices)
    found = compiled("wide gpt", ticks, layout)
    tensor = [c for c in found.collectives if c.axes == ("tensor",)]
    assert tensor
    assert all(c.times_low == 0 for c in tensor)
    moved = [c for c in found.collectives if c.kind == "collective-permute"]
    assert {c.axes for c in moved} == {("stage",)}
    assert {c.times_high for c in moved} == {ticks.ticks}
    # Gradients are summed over data once, each device its part of them.
    (data,) = [c for c in found.collectives if c.axes == ("data",)]
    layers, shared = jax.eval_shape(MODELS["wide gpt"]()[1], jax.random.key(0))
    whole = sum(leaf.size * 4 for leaf in jax.tree.leaves((layers, shared)))
    assert data.times_high == 1
    # Half of the layers, half of each.
    assert data.payload_bytes < 0.3 * whole
