"""The programs of the benches of collectives: one function of each device's own arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.mesh import Device
from jaxdist.types import PyTree


def make_mesh(devices: Sequence[Device], sizes: Sequence[int], names: Sequence[str]) -> Mesh:
    """The devices in their order, on axes of these sizes; all of them auto."""
    shape = np.asarray(devices).reshape(sizes)
    return Mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def split(mesh: Mesh) -> NamedSharding:
    """Dim 0 split over all axes of the mesh."""
    return NamedSharding(mesh, P(mesh.axis_names))


def compile_local(
    function: Callable[[PyTree], PyTree], mesh: Mesh, tree: PyTree, *, donate: bool = False
) -> jax.stages.Compiled:
    """A function of one device's own tree, for a global tree (of arrays or shapes) that is `split`.

    Args:
      donate: the result may take the memory of the argument.
    """
    spec = split(mesh).spec
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped, donate_argnums=0 if donate else ()).lower(tree).compile()
