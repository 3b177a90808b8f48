"""The choice of a strategy in a config, by `type:`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jaxdist.train.strategy.lookahead import Lookahead
from jaxdist.train.strategy.parameter_server import ParameterServer
from jaxdist.train.strategy.synchronous import Synchronous

StrategyConfig = Annotated[Synchronous | Lookahead | ParameterServer, Field(discriminator="type")]
"""Each is a `jaxdist.train.strategy.contract.Strategy`."""
