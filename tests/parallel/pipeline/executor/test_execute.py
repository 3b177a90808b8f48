import jax
import numpy as np
import pytest
from pipeline_models import alone, batch, from_chunks, on_mesh, program, to_chunks
from pipeline_tables import TABLES

from jaxdist.parallel.pipeline.executor.lower import lower
from jaxdist.pipeline_schedules.derived import forward_only
from jaxdist.pipeline_schedules.schedule import loop, v_shape

M = 8
CELLS = [
    ("mlp", {"stage": 1}, "zb_h1", "stash"),
    ("mlp", {"stage": 4}, "gpipe", "recompute"),
    ("mlp", {"stage": 4}, "1f1b", "stash"),
    ("mlp", {"stage": 4}, "eager", "recompute"),
    ("mlp", {"stage": 4}, "interleaved", "recompute"),
    ("mlp", {"stage": 4}, "zb_h2", "stash"),
    ("mlp", {"stage": 4}, "zb_v", "recompute"),
    ("mlp", {"stage": 2, "data": 2}, "v_half", "stash"),
    ("mlp", {"stage": 2, "data": 2}, "v_min", "recompute"),
    ("mlp", {"data": 2, "stage": 2, "tensor": 2}, "dual_pipe_v", "stash"),
    ("mlp", {"stage": 2, "data": 2, "tensor": 2}, "breadth_first", "recompute"),
    ("gpt", {"stage": 2, "data": 2, "tensor": 2}, "eager", "recompute"),
    ("gpt dots", {"stage": 2, "data": 2}, "zb_h1", "stash"),
    ("gpt named", {"stage": 2, "data": 2}, "zb_h1", "stash"),
]


def same(found, expected, within=2e-6):
    """Within so much of the largest entry of each tensor."""

    def leaf(a, b):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=within * np.abs(b).max())
        assert np.abs(b).max() > 0

    jax.tree.map(leaf, found, expected)


def shown(model, mesh, table, policy):
    """Schedules are run by the model that compiles soon; for gpt stand tests of whole steps."""
    marks = () if model == "mlp" else pytest.mark.slow
    return pytest.param(model, mesh, table, policy, id=f"{model}-{table}", marks=marks)


@pytest.mark.parametrize(("model", "mesh", "table", "policy"), [shown(*cell) for cell in CELLS])
@pytest.mark.every(3)
def test_gradients_and_loss_equal_one_device(model, mesh, table, policy):
    ticks = lower(TABLES[table](mesh["stage"], M), activations=policy)
    step, place = program(model, ticks, on_mesh(mesh))
    (layers, shared), (layer_grads, shared_grads, total) = alone(model, M)
    found = step(*place(to_chunks(layers, ticks), shared, batch(M)))
    same(from_chunks(found.chunk_grads, ticks), layer_grads)
    same(found.shared_grads, shared_grads)
    for shard in found.sums["loss"].total.addressable_shards:
        np.testing.assert_allclose(shard.data, total, rtol=2e-6)


def test_every_schedule_is_run_by_some_cell():
    assert {table for model, _, table, _ in CELLS if model == "mlp"} == {*TABLES}


@pytest.mark.parametrize("placement", [loop(2, 4), v_shape(2)], ids=str)
def test_evaluation_runs_forward_tasks_alone(placement):
    ticks = lower(forward_only(placement, M))
    step, place = program("mlp", ticks, on_mesh({"stage": 2, "data": 2}))
    (layers, shared), (_, _, total) = alone("mlp", M)
    sums = step(*place(to_chunks(layers, ticks), shared, batch(M)))
    for shard in sums["loss"].total.addressable_shards:
        np.testing.assert_allclose(shard.data, total, rtol=2e-6)
    assert float(sums["rows"]) == M * 4


@pytest.mark.slow
def test_random_layers_draw_the_same_by_any_policy():
    """Masks are drawn again where a chunk is computed again, others for each microbatch."""
    found = []
    for policy in ("recompute", "stash"):
        ticks = lower(TABLES["1f1b"](2, M), activations=policy)
        key = jax.random.key(3)
        step, place = program("dropout", ticks, on_mesh({"stage": 2}), key=key)
        (layers, shared), (undropped, _, _) = alone("dropout", M)
        found.append(step(*place(to_chunks(layers, ticks), shared, batch(M))))
    same(found[1], found[0], within=1e-5)  # what is computed again is rounded anew
    far = np.abs(from_chunks(found[0].chunk_grads, ticks)["up"] - undropped["up"]).max()
    assert far > 0.05 * np.abs(undropped["up"]).max()


@pytest.mark.full
def test_gradients_of_dropped_out_layers_are_those_of_the_loss():
    """Along a direction, by central differences of the sums that the step itself reports."""
    ticks = lower(TABLES["eager"](2, M))
    step, place = program("dropout", ticks, on_mesh({"stage": 2}), key=jax.random.key(3))
    (layers, shared), _ = alone("dropout", M)

    def at(size):
        moved = {**layers, "down": layers["down"] + size * np.sign(layers["down"])}
        found = step(*place(to_chunks(moved, ticks), shared, batch(M)))
        slope = from_chunks(found.chunk_grads, ticks)["down"] * np.sign(layers["down"])
        return float(found.sums["loss"].total), float(slope.sum())

    size = 1e-3
    measured = (at(size)[0] - at(-size)[0]) / (2 * size)
    np.testing.assert_allclose(measured, at(0)[1], rtol=5e-3)
