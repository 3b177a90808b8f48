"""From a config to which mesh axes are manual, and what does not combine, refused before a run."""

from __future__ import annotations

from collections.abc import Mapping

from jaxdist.collectives.build import ReduceConfig
from jaxdist.config.schema import Config
from jaxdist.errors import ConfigError
from jaxdist.mesh import axis_names
from jaxdist.parallel.data import DataParallel
from jaxdist.sharding import Dims, Layout


class ParallelConfig(Config):
    """What jaxdist does itself, instead of leaving it to the compiler."""

    reduce: ReduceConfig | None = None
    """How gradients are summed over the data axis; null lets XLA place the reductions."""


def plan_data_parallel(
    config: ParallelConfig, layout: Layout, dims: Mapping[str, Dims]
) -> DataParallel | None:
    """The explicit gradient reduction that the config asks for; None leaves it to XLA.

    Args:
      dims: logical dims of each parameter.

    Raises:
      ConfigError: the reduction does not go together with the layout.
    """
    if config.reduce is None:
        return None
    axis = layout.axis_of("batch")
    names = axis_names(layout.mesh, axis) if axis else ()
    if not names:
        raise ConfigError(
            f"a reduction of type {config.reduce.type!r} needs a mesh axis that splits the batch, "
            f"and the mesh {dict(layout.mesh.shape)} has none; set mesh.data, or reduce: null"
        )
    for name, found in dims.items():
        for dim in found:
            if layout.axis_of(dim) == axis:
                raise ConfigError(
                    f"a reduction of type {config.reduce.type!r} needs parameters that are whole "
                    f"along {axis!r}, and the rule {dim}: {axis} splits {name} over it; set "
                    f"sharding.rules.{dim}: null, or reduce: null"
                )
    return DataParallel(layout.mesh, names, config.reduce)
