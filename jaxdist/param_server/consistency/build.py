"""The choice of a consistency model in a config, by `type:`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jaxdist.param_server.consistency.arrival import SSP, AdaptiveSSP, Asynchronous
from jaxdist.param_server.consistency.decoupled import Decoupled
from jaxdist.param_server.consistency.elastic import Elastic
from jaxdist.param_server.consistency.rounds import BSP

ConsistencyConfig = Annotated[
    BSP | SSP | Asynchronous | AdaptiveSSP | Elastic | Decoupled, Field(discriminator="type")
]
"""The consistency model of a config."""
