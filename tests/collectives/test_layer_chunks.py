"""Functions of stacked layers in chunks: the same values, in the buffers that are there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.collectives.layer_chunks import by_layers, layers_at_once


def leaves():
    rng = np.random.default_rng(0)
    shapes = (6, 4, 3), (5,), (4, 8), (6, 2)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


LAYERS = [6, None, 4, 6]


@pytest.mark.parametrize("chunk_bytes", [1, 60, 150, 10**6])
def test_chunks_do_not_change_the_result(chunk_bytes):
    given = leaves()
    found = by_layers(
        lambda positions, some: [x * (i + 2) for x, i in zip(some, positions, strict=True)],
        given,
        LAYERS,
        chunk_bytes,
    )
    for i, (leaf, result) in enumerate(zip(given, found, strict=True)):
        np.testing.assert_array_equal(result, leaf * (i + 2))


@pytest.mark.parametrize("chunk_bytes", [1, 10**6])
def test_results_may_be_shorter_or_fill_other_buffers(chunk_bytes):
    given = leaves()
    shorter = by_layers(
        lambda _, some: [x[:, :2] if x.ndim > 1 else x for x in some], given, LAYERS, chunk_bytes
    )
    longer = by_layers(
        lambda _, some: [jnp.concatenate([x, x], -1) for x in some],
        given,
        LAYERS,
        chunk_bytes,
        into=[jnp.zeros((*x.shape[:-1], 2 * x.shape[-1])) for x in given],
    )
    for leaf, short, long in zip(given, shorter, longer, strict=True):
        np.testing.assert_array_equal(short, leaf[:, :2] if leaf.ndim > 1 else leaf)
        np.testing.assert_array_equal(long, np.concatenate([leaf, leaf], -1))


@pytest.mark.parametrize(("chunk_bytes", "chunks"), [(1, 6), (2 * 56, 3), (3 * 56, 2), (5 * 56, 2)])
def test_a_chunk_holds_as_many_layers_as_divide_and_fit(chunk_bytes, chunks):
    stacks = [jnp.zeros((6, 4, 3)), jnp.zeros((6, 2))]  # 56 bytes a layer
    assert layers_at_once(stacks, chunk_bytes) == 6 // chunks
    text = str(jax.make_jaxpr(lambda x: by_layers(lambda _, y: y, x, [6, 6], chunk_bytes))(stacks))
    assert f"length={chunks}" in text or f"{chunks}:i32" in text


def test_what_fits_in_one_chunk_goes_with_the_rest():
    seen = []
    by_layers(lambda positions, some: seen.append(positions) or some, leaves(), LAYERS, 10**6)
    assert seen == [[0, 1, 2, 3]]
    seen.clear()
    # Two layers of the six at once, all of the four.
    by_layers(lambda positions, some: seen.append(positions) or some, leaves(), LAYERS, 128)
    assert seen[-1] == [1, 2]
    assert set(map(tuple, seen[:-1])) == {(0, 3)}


def test_one_chunk_is_no_loop():
    text = str(jax.make_jaxpr(lambda x: by_layers(lambda _, y: y, x, LAYERS, 10**6))(leaves()))
    assert "while" not in text
    assert "scan" not in text
