"""From a config to which mesh axes are manual, and what does not combine, refused before a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxdist.collectives.build import ReduceConfig
from jaxdist.config.schema import Config
from jaxdist.errors import ConfigError
from jaxdist.mesh import axis_names, describe
from jaxdist.parallel.data import DataParallel
from jaxdist.parallel.zero import Zero, ZeroConfig, plan_zero
from jaxdist.sharding import Dims, Layout


class ParallelConfig(Config):
    """What jaxdist does itself, instead of leaving it to the compiler."""

    reduce: ReduceConfig | None = None
    """How gradients are summed over the data axis; null lets XLA place the reductions."""
    zero: ZeroConfig = ZeroConfig()
    """What of the training state each device keeps only a shard of."""


@dataclass(frozen=True)
class Plan:
    """What runs on the data axis: see `jaxdist.train.step.Program`."""

    data_parallel: DataParallel | None
    zero: Zero | None


def plan_parallel(
    config: ParallelConfig, layout: Layout, params: Any, dims: Mapping[str, Dims]
) -> Plan:
    """What the config asks for, checked against the mesh and the model.

    Args:
      params: the parameters, or their shapes.
      dims: logical dims of each parameter, by name.

    Raises:
      ConfigError: settings that do not go together, or not with the layout.
    """
    zero = plan_zero(config.zero, layout, params, dims)
    return Plan(plan_data_parallel(config, layout, dims, zero), zero)


def plan_data_parallel(
    config: ParallelConfig, layout: Layout, dims: Mapping[str, Dims], zero: Zero | None = None
) -> DataParallel | None:
    """The explicit gradient reduction that the config asks for; None leaves it to XLA.

    Args:
      dims: logical dims of each parameter.
      zero: which gradients end in shards.

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
    others = {axis: size for axis, size in layout.mesh.shape.items() if axis not in names}
    if zero and zero.stage >= 2 and math.prod(others.values()) > 1 and not config.reduce.native:
        raise ConfigError(
            f"zero.stage {zero.stage} with a {config.reduce.type!r} reduction, whose blocks "
            f"are flat, would gather what {describe(others)} splits; use reduce: {{type: xla}}, "
            "reduce: null, or zero.stage: 1"
        )
    return DataParallel(layout.mesh, names, config.reduce, zero)
