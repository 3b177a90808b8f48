"""The choice of a placement in a config, by `type:`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jaxdist.param_server.placement.balanced import Balanced
from jaxdist.param_server.placement.central import Central
from jaxdist.param_server.placement.hashed import Hashed

PlacementConfig = Annotated[Central | Balanced | Hashed, Field(discriminator="type")]
"""The placement of a config, a `jaxdist.param_server.placement.contract.PlacementRule`."""
