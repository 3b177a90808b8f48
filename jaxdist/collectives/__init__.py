"""The collectives of jaxdist: six operations, and several algorithms for each operation.

The operations are for use inside `jax.shard_map`. The algorithms except `Xla` send messages by
`jax.lax.ppermute`.
"""

from jaxdist.collectives.algorithms.auto import Auto
from jaxdist.collectives.algorithms.build import ReduceConfig
from jaxdist.collectives.algorithms.double_tree import DoubleTree
from jaxdist.collectives.algorithms.halving import Halving
from jaxdist.collectives.algorithms.hierarchical import Hierarchical
from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.collectives.algorithms.tree import Tree
from jaxdist.collectives.algorithms.xla import Xla
from jaxdist.collectives.axis import Axis
from jaxdist.collectives.bucket import reduce_tree
from jaxdist.collectives.channels import SeparateChannels
from jaxdist.collectives.contract import Algorithm, Traffic
from jaxdist.collectives.operations import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce,
    reduce_scatter,
)
from jaxdist.collectives.split import gather_leaves, scatter_leaves
from jaxdist.errors import CollectiveError

__all__ = [
    "Algorithm",
    "Auto",
    "Axis",
    "CollectiveError",
    "DoubleTree",
    "Halving",
    "Hierarchical",
    "ReduceConfig",
    "Ring",
    "SeparateChannels",
    "Traffic",
    "Tree",
    "Xla",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather_leaves",
    "reduce",
    "reduce_scatter",
    "reduce_tree",
    "scatter_leaves",
]
