"""The config section that chooses an algorithm by its `type`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jaxdist.collectives.algorithms.auto import Auto
from jaxdist.collectives.algorithms.double_tree import DoubleTree
from jaxdist.collectives.algorithms.halving import Halving
from jaxdist.collectives.algorithms.hierarchical import Hierarchical
from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.collectives.algorithms.tree import Tree
from jaxdist.collectives.algorithms.xla import Xla

ReduceConfig = Annotated[
    Xla | Ring | Tree | DoubleTree | Halving | Hierarchical | Auto, Field(discriminator="type")
]
