"""The configs of the strategies, of which an experiment selects one by `type`.

`jaxdist.experiment.strategies` checks a strategy against the rest of the config, and
`jaxdist.run.strategies` runs it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jaxdist.config.schema import Config
from jaxdist.param_server.cluster import Cluster
from jaxdist.train.strategy.lookahead import Lookahead


class Synchronous(Config):
    """All processes take every step together, and only steps change parameters."""

    type: Literal["synchronous"] = "synchronous"
    """Selects this strategy."""

    def outer(self) -> None:
        return None


class ParameterServer(Cluster):
    """Workers push gradients to servers, which hold the parameters and update them.

    Dean et al., "Large scale distributed deep networks" (NIPS 2012); Li et al., "Scaling
    distributed machine learning with the parameter server" (OSDI 2014).
    """

    type: Literal["parameter_server"] = "parameter_server"
    """Selects this strategy."""

    def outer(self) -> None:
        return None


StrategyConfig = Annotated[Synchronous | Lookahead | ParameterServer, Field(discriminator="type")]
"""The union of strategies; each is a `jaxdist.train.strategy.contract.Strategy`."""
