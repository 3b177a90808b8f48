"""The section `elastic` of a configuration: what hosts that come and go must agree on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from jaxdist.config.document import Document
from jaxdist.config.schema import Config, validate
from jaxdist.elastic.membership import MembershipConfig


class ElasticConfig(Config):
    """Settings of elastic runs, whose hosts may join and leave: `jaxdist agent`."""

    lease_seconds: PositiveFloat = 10.0
    """A host that sends no heartbeat for this time is considered lost."""
    settle_seconds: NonNegativeFloat = 5.0
    """A generation starts, or saves and stops in order to grow, once no host has joined or left for
    this time."""
    drift: Annotated[float, Field(ge=0, lt=0.5)] = 0.01
    """The largest relative error of any host's clock, fast or slow."""
    stuck_host_seconds: NonNegativeFloat = 300.0
    """Time for which a host with a stuck process is excluded, if the other hosts can train without
    it; 0 lets it rejoin at once."""
    batch: Literal["same", "rescale"] = "same"
    """What to do when the mesh shrinks: `same` keeps the batch, in more microbatches; `rescale`
    shrinks the batch with the mesh and sets the learning rate by the rule of optim.scale_from."""

    def membership(self, least: int, most: int) -> MembershipConfig:
        """The same, of so many hosts.

        Raises:
          ConfigError: more at least than at most.
        """
        given = {**self.model_dump(exclude={"batch"}), "min_hosts": least, "max_hosts": most}
        return validate(Document(given), MembershipConfig)
