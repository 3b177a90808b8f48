"""Functions that run a function of one device's arrays on fake devices, and all algorithms."""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from jaxdist.collectives import DoubleTree, Halving, Hierarchical, Ring, Tree, Xla

FLAT = (
    Xla(),
    Ring(),
    Ring(directions=2),
    Ring(chunks=3),
    Ring(directions=2, chunks=2),
    Tree(),
    DoubleTree(),
    Halving(),
)
LEVELS = (
    Hierarchical(),
    Hierarchical(inside=Xla(), across=Halving()),
    Hierarchical(inside=Halving(), across=Xla()),
    Hierarchical(inside=Ring(directions=2), across=Tree()),
    Hierarchical(inside=DoubleTree(), across=Ring(chunks=2)),
)


def label(value):
    """Return the name of an algorithm for the id of a test."""
    if isinstance(value, Hierarchical):
        return f"{label(value.inside)}-in-{label(value.across)}"
    if isinstance(value, Ring):
        return f"ring{value.directions}x{value.chunks}"
    return getattr(value, "type", None)


def mesh_of(sizes):
    """Return a mesh of auto axes with these sizes, over the first devices."""
    devices = jax.devices()[: math.prod(sizes.values())]
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


def mapped(function, sizes, *, check_vma=False, jit=True):
    """Return `function`, of one device's tree, as a function of all devices' stacked trees.

    Arguments and results of all devices are stacked along dim 0.
    """
    spec = PartitionSpec(tuple(sizes))

    def one(tree):
        result = function(jax.tree.map(lambda x: x[0], tree))
        return jax.tree.map(lambda x: x[None], result)

    whole = jax.shard_map(
        one, mesh=mesh_of(sizes), in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    return jax.jit(whole) if jit else whole


def run(function, tree, sizes, **options):
    """Run `function` on all devices; return the results, stacked along dim 0, as numpy arrays."""
    return jax.tree.map(np.asarray, mapped(function, sizes, **options)(tree))
