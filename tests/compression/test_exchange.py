"""How messages travel where each collective counts: all arrays in one, large ones in pieces."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from sharded import mesh_of

from jaxdist.compression import Sign, TopK, compressed_all_reduce, exchange, init_state
from jaxdist.hlo import ledger

N = 4
KINDS = ("all-to-all", "all-gather")
SIZE = 300  # no multiple of a block, nor of the devices


def reduced(codec):
    """Results and residuals of all devices after two rounds, and the program's ledger."""
    mesh = mesh_of({"data": N})

    def one(grads, state):
        for _ in range(2):
            found = compressed_all_reduce(grads, state, "data", codec=codec)
            state = found.state
        return found.grads, state

    spec = PartitionSpec("data")
    mapped = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    grads = jnp.asarray(np.random.default_rng(5).standard_normal(N * SIZE), jnp.float32)
    state = init_state(jax.ShapeDtypeStruct((SIZE,), jnp.float32), N, codec=codec)
    compiled = mapped.lower(grads, state).compile()
    return jax.tree.map(np.asarray, compiled(grads, state)), ledger(compiled, mesh)


@pytest.mark.parametrize("codec", [Sign(block=16), TopK(fraction=0.1)], ids=lambda c: c.type)
@pytest.mark.every(2)
def test_all_arrays_of_a_message_in_one_collective(devices, monkeypatch, codec):
    apart, several = reduced(codec)
    monkeypatch.setattr(exchange, "sends_apart", lambda: True)
    monkeypatch.setattr(exchange, "PIECE_BYTES", 39)  # of 4 x 20 bytes to all devices
    together, one = reduced(codec)
    jax.tree.map(np.testing.assert_array_equal, together, apart)
    scatters = codec.exchange == "scatter"
    assert [several.count(kind) for kind in KINDS] == [4 * scatters, 4]
    assert [one.count(kind) for kind in KINDS] == [6 * scatters, 2]
    # Three pieces of 20 bytes are 7, 7 and 6.
    assert one.sent_bytes() == several.sent_bytes()
