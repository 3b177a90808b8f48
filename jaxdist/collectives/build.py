"""The choice of an algorithm in a config, by `type:`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jaxdist.collectives.auto import Auto
from jaxdist.collectives.double_tree import DoubleTree
from jaxdist.collectives.halving import Halving
from jaxdist.collectives.hierarchical import Hierarchical
from jaxdist.collectives.ring import Ring
from jaxdist.collectives.tree import Tree
from jaxdist.collectives.xla import Xla

ReduceConfig = Annotated[
    Xla | Ring | Tree | DoubleTree | Halving | Hierarchical | Auto, Field(discriminator="type")
]
