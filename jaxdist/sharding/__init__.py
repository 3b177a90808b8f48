"""From logical dims to mesh axes, strictly: what matches no rule, or no dim, is an error.

Models name the *dims* of each parameter ("embed", "mlp"); rules map a dim to a mesh axis; a mesh
that lacks the axis leaves the dim whole. So one set of rules serves every mesh, and moving a model
to another mesh changes the config's `mesh:` alone.
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
