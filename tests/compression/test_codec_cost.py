"""Predictions of compressed reductions: bytes as the compiled program sends them, and time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from sharded import mesh_of

from jaxdist.collectives import all_gather, reduce_scatter
from jaxdist.collectives.cost import Level
from jaxdist.compression import (
    Adaptive,
    Cast,
    Chain,
    LowRank,
    PerParameter,
    Quantize,
    RandomK,
    Sign,
    Stage,
    Stages,
    TopK,
    WholeCodec,
    compressed_all_reduce,
    init_state,
)
from jaxdist.compression.cost import coding_bytes, coding_bytes_per_second, predict, shard_shapes
from jaxdist.compression.feedback.none import NoFeedback
from jaxdist.errors import CompressionError, JaxdistError
from jaxdist.hlo import ledger
from jaxdist.runtime.hardware import Link

LINK = Link(1e-3, 1e7)
NONE = NoFeedback()
CODECS = (
    WholeCodec(), Cast(), Cast(dtype="float16"), Quantize(), Quantize(bits=4), Adaptive(bits=3),
    Sign(), TopK(fraction=0.1), RandomK(fraction=0.1), LowRank(rank=2),
    Chain(first=TopK(fraction=0.1), then=Quantize(block=8)),
    Stages(stages=(Stage(start=0, codec=WholeCodec()), Stage(start=3, codec=LowRank(rank=2)))),
)  # fmt: skip


def drawn_leaves(random, count, multiple=1):
    """Matrices and vectors of any sizes."""
    sizes = random.integers(1, 5, (count, 2)) * 4 * multiple
    shapes = [tuple(map(int, pair)) for pair in sizes] + [(int(sizes[0, 0]),)]
    return {f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(shapes)}


def sent_bytes(leaves, choice, sizes, inside=False, bucket_bytes=2**20):
    """By the ledger of the compiled program."""
    mesh = mesh_of(sizes)
    axes = tuple(sizes)
    fast = axes[-1]
    own = shard_shapes(leaves, sizes[fast]) if inside else leaves
    parties = mesh.size // sizes[fast] if inside else mesh.size
    options = {"codec": choice, "feedback": NONE, "bucket_bytes": bucket_bytes}

    def one(grads, state):
        if not inside:
            return compressed_all_reduce(grads, state, axes, **options).grads
        shards = jax.tree.map(lambda g: reduce_scatter(g, fast), grads)
        found = compressed_all_reduce(shards, state, axes[:-1], **options)
        return jax.tree.map(lambda g: all_gather(g, fast), found.grads)

    spec = PartitionSpec(axes)
    state = jax.eval_shape(lambda: init_state(own, parties, **options))
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct((mesh.size, *x.shape[1:]), x.dtype), state)
    mapped = jax.shard_map(
        one, mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=PartitionSpec(), check_vma=False
    )
    return ledger(jax.jit(mapped).lower(leaves, state).compile(), mesh).sent_bytes()


def predicted(leaves, choice, sizes, inside=False, link=LINK, **options):
    levels = [Level(size, link) for size in sizes.values()]
    return predict(leaves, choice, levels, bytes_per_second=1e9, inside=inside, **options)


@pytest.mark.parametrize("codec", CODECS[:-1], ids=lambda c: c.type)
@pytest.mark.every(3)
def test_bytes_are_those_of_the_compiled_program(devices, codec):
    random = np.random.default_rng(CODECS.index(codec))
    leaves, choice = drawn_leaves(random, 2), PerParameter(otherwise=codec)
    sizes, small = {"data": 4}, 4 * int(random.integers(100, 600))
    found = predicted(leaves, choice, sizes, bucket_bytes=small).sent_bytes
    assert found == pytest.approx(sent_bytes(leaves, choice, sizes, bucket_bytes=small), abs=0.1)


def test_bytes_of_the_form_of_two_levels(devices):
    leaves = drawn_leaves(np.random.default_rng(7), 2, multiple=8)
    sizes, choice = {"slow": 2, "fast": 4}, PerParameter(otherwise=Sign(block=8))
    found = predicted(leaves, choice, sizes, inside=True)
    assert found.sent_bytes == pytest.approx(sent_bytes(leaves, choice, sizes, inside=True))
    assert shard_shapes({"odd": jax.ShapeDtypeStruct((3, 5), "float32")}, 4)["odd"].shape == (3, 5)


def test_time_is_the_collectives_and_the_passes():
    """Sign on a link of a millisecond: 2 of the messages, 1 of the flag, in the model's steps."""
    leaves, devices = {"w": jax.ShapeDtypeStruct((4096,), jnp.float32)}, {"data": 4}
    found = predicted(leaves, Sign(), devices)
    shard_bytes = 1024 // 8 + 2
    steps = {"all_to_all": 1, "all_gather": 2, "all_reduce": 4}
    sent = 3 * shard_bytes * 2 + 2 * 3 / 4 * 4
    assert found.sent_bytes == sent
    assert found.wire_seconds == pytest.approx(sum(steps.values()) * 1e-3 + sent / 1e7)
    assert found.coding_seconds == pytest.approx(coding_bytes(leaves, Sign()) / 1e9)
    assert found.seconds == found.wire_seconds + found.coding_seconds


def test_what_stages_end_with_is_predicted():
    leaves = {"w": jax.ShapeDtypeStruct((16, 16), jnp.float32)}
    assert predicted(leaves, CODECS[-1], {"data": 4}) == predicted(
        leaves, LowRank(rank=2), {"data": 4}
    )


def test_one_device_sends_nothing():
    leaves = {"w": jax.ShapeDtypeStruct((16, 16), jnp.float32)}
    found = predicted(leaves, Sign(), {"data": 1})
    assert (found.wire_seconds, found.sent_bytes) == (0, 0)
    assert found.coding_seconds > 0


def test_speed_of_coding():
    assert coding_bytes_per_second("TPU v5 lite") == 8.1e11
    assert coding_bytes_per_second("cpu") < 3.1e10
    with pytest.raises(JaxdistError, match="the speed of codecs on 'abacus' is unknown"):
        coding_bytes_per_second("abacus")


def test_what_cannot_be_encoded_is_refused():
    vector = {"bias": jax.ShapeDtypeStruct((5,), jnp.float32)}
    with pytest.raises(
        CompressionError, match=r"parameter bias float32\[5\]: lowrank needs a matrix"
    ):
        predicted(vector, LowRank(), {"data": 4})
