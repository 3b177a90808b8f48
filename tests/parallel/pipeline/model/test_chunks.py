"""Chunks that differ: in their number of layers, and in their shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from pipeline_models import on_mesh
from pipeline_tables import TABLES, greedy

from jaxdist.errors import ConfigError
from jaxdist.parallel.pipeline.executor.execute import evaluate_pipeline, run_pipeline
from jaxdist.parallel.pipeline.executor.lower import lower
from jaxdist.parallel.pipeline.executor.model_fns import GradientsAndSums, ModelFns, Visit
from jaxdist.parallel.pipeline.executor.stage import StageContext
from jaxdist.parallel.pipeline.model.chunks import Cut, from_stages, to_stages
from jaxdist.parallel.pipeline.model.packed import pack_model
from jaxdist.pipeline_schedules.derived import forward_only
from jaxdist.pipeline_schedules.schedule import loop

M, ROWS, D = 4, 2, 6
KEYS = jax.random.split(jax.random.key(1), 8)
BATCH = {"x": jax.random.normal(KEYS[0], (M, ROWS, D)), "y": jnp.ones((M, ROWS, 3))}


def on_stages(ticks, parts, chunks, shared):
    """What the executor finds, chunks in the model's order."""
    layout = on_mesh({"stage": ticks.stages})
    everywhere, staged = PartitionSpec(), PartitionSpec("stage")
    way, out = (
        (run_pipeline, GradientsAndSums(staged, everywhere, everywhere))
        if ticks.trains
        else (evaluate_pipeline, None)
    )
    function = jax.shard_map(
        lambda *given: way(StageContext(ticks, parts, *given, "stage")),
        mesh=layout.mesh,
        in_specs=(staged, everywhere, everywhere),
        out_specs=everywhere if out is None else out,
        check_vma=False,
    )
    found = jax.jit(function)(to_stages(chunks, ticks.placement), shared, BATCH)
    if out is None:
        return found
    return found._replace(chunk_grads=from_stages(found.chunk_grads, ticks.placement))


def same(found, expected):
    def leaf(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())

    jax.tree.map(leaf, found, expected)


def embed(shared, visit):
    return visit.rows["x"] @ shared["in"]


def head(shared, x, visit):
    off = jnp.sum((x @ shared["out"] - visit.rows["y"]) ** 2)
    return off, off


def expected(total, params, shared):
    return jax.jit(jax.value_and_grad(total, (0, 1)))(params, shared)


def visits():
    for m in range(M):
        yield Visit(jax.tree.map(lambda leaf, m=m: leaf[m], BATCH), jnp.int32(0), None)


def layer(weights, x):
    return x + jnp.tanh(x @ weights)


LAYERS = jax.random.normal(KEYS[1], (8, D, D)) * 0.4
ENDS = {
    "in": jax.random.normal(KEYS[2], (D, D)) * 0.4,
    "out": jax.random.normal(KEYS[3], (D, 3)) * 0.4,
}


@pytest.mark.parametrize(
    ("layers", "policy"),
    [
        ((3, 2, 2, 1), "recompute"),
        pytest.param((3, 2, 2, 1), "stash", marks=pytest.mark.full),
        pytest.param((2, 2, 2, 2), "recompute", marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_chunks_may_have_different_numbers_of_layers(layers, policy):
    cut = Cut(layers)
    blocks = lambda params, x, visit: cut.scan(layer, params, x, visit.chunk)  # noqa: E731

    def total(layers, shared):
        found = 0.0
        for visit in visits():
            x = jax.lax.scan(lambda x, w: (layer(w, x), None), embed(shared, visit), layers)[0]
            found += head(shared, x, visit)[0]
        return found

    table = TABLES["v_min"](2, M) if policy == "stash" else TABLES["1f1b"](4, M)
    ticks = lower(table, activations=policy)
    found = on_stages(ticks, ModelFns(embed, blocks, head), cut.to_chunks(LAYERS), ENDS)
    value, grads = expected(total, LAYERS, ENDS)
    same((cut.from_chunks(found.chunk_grads), found.shared_grads), grads)
    same(found.sums, value)


def test_layers_that_a_chunk_has_not_are_not_run():
    ran = []
    cut = Cut((3, 1))

    def noted(weights, x):
        jax.debug.callback(lambda: ran.append(1))
        return layer(weights, x)

    for chunk, count in enumerate(cut.layers):
        ran.clear()
        params = cut.to_chunks(LAYERS[:4])[chunk]
        scan = jax.jit(lambda p, c: cut.scan(noted, p, jnp.ones((ROWS, D)), c))
        jax.block_until_ready(scan(params, jnp.int32(chunk)))
        jax.effects_barrier()
        assert len(ran) == count


def wide(params, x, visit):
    """`[rows, D]` to `[rows, 2, D]`."""
    return jnp.tanh(jnp.stack([x @ params["a"], x * params["b"]], axis=1))


def narrow(params, x, visit):
    """`[rows, 2, D]` to `[rows, 3]`."""
    return jnp.tanh(x.reshape(len(x), -1) @ params)


def plain(params, x, visit):
    return x


def widen(params, x, visit):
    """`[rows, 3]` to `[rows, D]`."""
    return x @ params["w"] + params["b"][None]


CHUNKS = (wide, narrow, widen, plain)
PARAMS = (
    {"a": jax.random.normal(KEYS[4], (D, D)), "b": jnp.float32(0.7)},
    jax.random.normal(KEYS[5], (2 * D, 3)),
    {"w": jax.random.normal(KEYS[6], (3, D)), "b": jnp.ones(D)},
    {},
)


def whole(params, shared):
    found = 0.0
    for visit in visits():
        x = embed(shared, visit)
        for chunk, own in zip(CHUNKS, params, strict=True):
            x = chunk(own, x, visit)
        found += head(shared, x, visit)[0]
    return found


@pytest.mark.parametrize(
    ("table", "policy"),
    [
        pytest.param(TABLES["1f1b"](4, M), "recompute", marks=pytest.mark.full),
        pytest.param(TABLES["zb_h1"](4, M), "stash", marks=pytest.mark.full),
        (greedy("uneven", (0, 1, 1, 2), M), "recompute"),
    ],
    ids=lambda given: getattr(given, "name", given),
)
@pytest.mark.full
def test_chunks_may_have_different_shapes(table, policy):
    packed = pack_model(embed, CHUNKS, head, PARAMS, ENDS, next(visits()))
    assert (packed.length, packed.features) == (D * D + 1, 2 * D)
    ticks = lower(table, activations=policy)
    found = on_stages(ticks, packed.parts, packed.pack(PARAMS), ENDS)
    value, grads = expected(whole, PARAMS, ENDS)
    same((found.chunk_grads, found.shared_grads), (packed.pack(grads[0]), grads[1]))
    same(found.sums, value)


@pytest.mark.full
def test_such_a_model_is_evaluated_too():
    packed = pack_model(embed, CHUNKS, head, PARAMS, ENDS, next(visits()))
    ticks = lower(forward_only(loop(2, 4), M))
    found = on_stages(ticks, packed.parts, packed.pack(PARAMS), ENDS)
    same(found, whole(PARAMS, ENDS))


def test_parameters_of_two_dtypes_do_not_fit_one_vector():
    params = ({**PARAMS[0], "b": jnp.bfloat16(1)}, *PARAMS[1:])
    with pytest.raises(
        ConfigError, match=r"packs parameters .* bfloat16 and float32: use a single dtype"
    ):
        pack_model(embed, CHUNKS, head, params, ENDS, next(visits()))


def test_activations_of_two_dtypes_do_not_fit_one_array():
    def half(params, x, visit):
        return x.astype(jnp.bfloat16)

    with pytest.raises(
        ConfigError, match=r"packs activations .* bfloat16 and float32: use a single dtype"
    ):
        pack_model(embed, (*CHUNKS[:3], half), head, PARAMS, ENDS, next(visits()))
