"""Compressed reductions of the stacked arrays of all devices."""

import jax
from jax.sharding import PartitionSpec

from jaxdist.compression import compressed_all_reduce


def of_one(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)


def reducer(mesh, axis="data", **options):
    """Return a function from (gradients, state) to (results, state, finite), for all devices.

    Each array has the arrays of all devices, stacked along dim 0.
    """

    def one(grads, state):
        own = jax.tree.map(lambda x: x[0], grads)
        found = compressed_all_reduce(own, state, axis, **options)
        return jax.tree.map(lambda x: x[None], found.grads), found.state, found.finite[None]

    spec = PartitionSpec(axis)
    mapped = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped)
