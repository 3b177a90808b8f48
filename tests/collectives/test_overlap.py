"""On a TPU a ring that is cut finer hides more of what it sends behind its own sums."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxdist.collectives import Ring, all_reduce
from jaxdist.hlo import ledger
from jaxdist.mesh import Device

ELEMENTS = 1 << 16


def overlapped_share(devices: list[Device], ring: Ring) -> float:
    """Of the bytes that a compiled all-reduce sends: those with compute scheduled meanwhile."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    spec = PartitionSpec("data")
    x = jax.ShapeDtypeStruct((8 * ELEMENTS,), jnp.float32, sharding=NamedSharding(mesh, spec))
    reduce = partial(all_reduce, axis="data", algorithm=ring)
    mapped = jax.shard_map(reduce, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    found = ledger(jax.jit(mapped).lower(x).compile(), mesh)
    hidden = sum(c.times_high * c.sent_bytes for c in found.collectives if c.overlapped)
    return hidden / found.sent_bytes()


@pytest.mark.full
def test_chunks_and_a_second_direction_overlap_more(tpu_devices: list[Device]) -> None:
    one_way, two_ways = (
        [overlapped_share(tpu_devices, Ring(directions=ways, chunks=count)) for count in (1, 2, 4)]
        for ways in (1, 2)
    )
    assert one_way[0] < one_way[1] < one_way[2]
    assert two_ways[0] < two_ways[1] < two_ways[2]
    assert all(one < two for one, two in zip(one_way, two_ways, strict=True))
