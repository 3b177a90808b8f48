"""Helpers that compile a function of each device's own arrays for the benches of collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.mesh import Device
from jaxdist.types import PyTree


def make_mesh(devices: Sequence[Device], sizes: Sequence[int], names: Sequence[str]) -> Mesh:
    """Return a mesh of the devices in their order, on axes of these sizes, all of type Auto."""
    shape = np.asarray(devices).reshape(sizes)
    return Mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def split(mesh: Mesh) -> NamedSharding:
    """Return the sharding that splits dim 0 over all axes of the mesh."""
    return NamedSharding(mesh, P(mesh.axis_names))


def compile_local(
    function: Callable[[PyTree], PyTree], mesh: Mesh, tree: PyTree, *, donate: bool = False
) -> jax.stages.Compiled:
    """Compile a function of a device's own tree, for a global tree of arrays or shapes.

    Args:
      tree: the global tree, whose leaves are sharded by `split`.
      donate: whether the result may take the memory of the argument.
    """
    spec = split(mesh).spec
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped, donate_argnums=0 if donate else ()).lower(tree).compile()
