from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flips import bits_of, with_bit_flipped
from jax.sharding import NamedSharding, PartitionSpec
from sharded import mesh_of

from jaxdist.train.digest import Replicas, digest

SPECS = {
    "kernel": PartitionSpec(None, "tensor"),
    "bias": PartitionSpec(),
    "half": PartitionSpec("tensor"),
    "mask": PartitionSpec(),
    "step": PartitionSpec(),
    "pair": PartitionSpec("data"),
    "alone": PartitionSpec("data", "tensor"),
}
VALUES = {
    "kernel": np.linspace(-1, 1, 48, dtype=np.float32).reshape(8, 6),
    "bias": np.array([0.0, -0.0, np.nan, np.inf, 1e-40], np.float32),
    "half": jnp.linspace(-3, 3, 16, dtype=jnp.bfloat16),
    "mask": np.array([True, False, True]),
    "step": np.int32(7),
    "pair": np.arange(12, dtype=np.int8).reshape(4, 3),
    "alone": np.ones((4, 2, 3), np.float32),
}
PLACES = [(at, bit) for at in range(8) for bit in range(32)]


@pytest.fixture(scope="module")
def replicas(devices):
    mesh = mesh_of({"data": 4, "tensor": 2})
    shapes = {
        name: jax.ShapeDtypeStruct(
            np.shape(VALUES[name]), VALUES[name].dtype, sharding=NamedSharding(mesh, spec)
        )
        for name, spec in SPECS.items()
    }
    return Replicas(mesh, shapes)


@pytest.fixture(scope="module")
def state(replicas):
    return {
        name: jax.device_put(VALUES[name], shape.sharding)
        for name, shape in replicas.shapes.items()
    }


def differences(replicas, state):
    return replicas.differences(np.asarray(replicas.digests(state)))


def test_equal_replicas_do_not_differ(replicas, state):
    assert differences(replicas, state) == ()


def test_of_a_hundred_flips_every_one_is_found_and_its_device_named(replicas, state):
    rng, lost = random.Random(0), []
    for _ in range(100):
        name = rng.choice([name for name in SPECS if name != "alone"])
        bit, device = rng.randrange(bits_of(state[name])), rng.choice(jax.devices())
        flipped = {**state, name: with_bit_flipped(state[name], bit, device)}
        found = differences(replicas, flipped)
        # Of two replicas, nobody can tell which is wrong.
        right = [
            (name, () if name == "pair" else (device,)) == (one.leaf, one.odd)
            and device in one.holders
            for one in found
        ]
        if right != [True]:
            lost.append((name, bit, device, found))
    assert not lost


def test_what_one_device_alone_holds_is_not_compared_and_counted_as_such(replicas, state):
    flipped = with_bit_flipped(state["alone"], 3, jax.devices()[5])
    assert differences(replicas, {**state, "alone": flipped}) == ()
    coverage = replicas.coverage
    alone, pair = 3 * 4, 3
    assert coverage.held_bytes - coverage.compared_bytes == alone
    assert coverage.compared_bytes == 24 * 4 + 5 * 4 + 8 * 2 + 3 + 4 + pair


def test_it_says_who_differs(replicas, state):
    devices = jax.devices()
    one = {**state, "bias": with_bit_flipped(state["bias"], 0, devices[6])}
    assert [found.told({0: "here"}) for found in differences(replicas, one)] == [
        "bias: device 6 (process 0 on here) differs from 7 equal replicas"
    ]
    half = state["bias"]
    for at, device in enumerate(devices[:4]):
        half = with_bit_flipped(half, at, device)
    half_wrong = {**state, "bias": half}
    assert [found.told({0: "here"}) for found in differences(replicas, half_wrong)] == [
        "bias: the replicas on device 0 (process 0 on here), device 1 (process 0 on here), "
        "device 2 (process 0 on here) and 5 more differ, and no majority of the 8 replicas is "
        "equal, so the wrong replica cannot be identified"
    ]


def test_each_shard_has_replicas_of_its_own(replicas, state):
    devices = replicas.mesh.devices
    kernel = state["kernel"]
    for device in (devices[0, 0], devices[2, 1]):
        kernel = with_bit_flipped(kernel, 11, device)
    found = differences(replicas, {**state, "kernel": kernel})
    assert [one.odd for one in found] == [(devices[0, 0],), (devices[2, 1],)]
    assert [set(one.holders) for one in found] == [set(devices[:, 0]), set(devices[:, 1])]


def test_a_digest_tells_every_bit_and_every_order():
    array = np.arange(1, 9, dtype=np.uint32)
    flips = [array ^ (np.arange(8) == at) * np.uint32(1 << bit) for at, bit in PLACES]
    # Two highest bits cancel out in a sum of words with multipliers.
    both = [array ^ (np.arange(8) % 7 == at) * np.uint32(1 << 31) for at in (0,)]
    moved = [array[::-1], np.roll(array, 1)]
    lanes = np.asarray(jax.vmap(digest)(np.stack([array, *flips, *both, *moved])))
    assert len(np.unique(lanes, axis=0)) == len(lanes)
    assert (lanes[0] != lanes[1 : 1 + len(flips)]).all(), "each lane finds each bit by itself"


@pytest.mark.full
def test_words_of_other_types():
    keys = jax.random.split(jax.random.key(0))
    assert digest(keys).tolist() == digest(jax.random.key_data(keys)).tolist()
    pair = jnp.array([1 + 2j], jnp.complex64)
    assert digest(pair).tolist() == digest(jnp.array([[1.0], [2.0]])).tolist()
    assert digest(jnp.zeros((0, 3))).tolist() == [0, 0]


def test_the_state_is_neither_copied_nor_given_away(replicas):
    shapes = {
        name: jax.ShapeDtypeStruct((64, 64, *s.shape[2:]), s.dtype, sharding=s.sharding)
        for name, s in replicas.shapes.items()
        if s.shape[1:]
    }
    compiled = Replicas(replicas.mesh, shapes).digests.lower(shapes).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < memory.argument_size_in_bytes / 4
    assert memory.alias_size_in_bytes == 0
