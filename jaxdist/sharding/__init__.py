"""The mapping from logical dims to mesh axes; a dim or rule without a match is an error.

Models name the *dims* of each parameter ("embed", "mlp"), and rules map a dim to a mesh axis. If
the mesh lacks the axis, the dim is not split. The same rules therefore serve every mesh, and moving
a model to another mesh changes only the config's `mesh:`.
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
