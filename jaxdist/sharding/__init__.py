"""The mapping from logical dims to mesh axes.

Models name the *dims* of each parameter ("embed", "mlp"), and rules map a dim to a mesh axis. If
the mesh does not have the axis, the dim is not split. The same rules therefore apply to every mesh.
For another mesh, only `mesh` changes in a config. A dim without a rule is an error, and so is a
rule for a dim that the model does not have.
"""

from jaxdist.sharding.dims import resolve_dims
from jaxdist.sharding.layout import (
    DEFAULT_RULES,
    Layout,
    ShardingConfig,
    make_layout,
    param_shardings,
)
from jaxdist.types import Dims

__all__ = [
    "DEFAULT_RULES",
    "Dims",
    "Layout",
    "ShardingConfig",
    "make_layout",
    "param_shardings",
    "resolve_dims",
]
