"""The section `elastic` of a configuration: what hosts that come and go must agree on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from jaxdist.config.document import Document
from jaxdist.config.schema import Config, validate
from jaxdist.elastic.membership import MembershipConfig


class ElasticConfig(Config):
    """Hosts that come and go: `jaxdist agent`."""

    lease_seconds: PositiveFloat = 10.0
    """A host that was not heard for so long is lost."""
    settle_seconds: NonNegativeFloat = 5.0
    """A generation begins, or is told to save and stop so as to grow, when for so long no host has
    come or gone."""
    drift: Annotated[float, Field(ge=0, lt=0.5)] = 0.01
    """By how much of the time clocks run too fast or too slow at most."""
    stuck_host_seconds: NonNegativeFloat = 300.0
    """For so long a host of which a process was stuck is left out, where the others can go on
    without it; 0: it takes part at once."""
    batch: Literal["same", "rescale"] = "same"
    """Where the mesh shrinks: `same`, in more microbatches; or as much smaller as the mesh, at a
    learning rate by the rule of optim.scale_from."""

    def membership(self, least: int, most: int) -> MembershipConfig:
        """The same, of so many hosts.

        Raises:
          ConfigError: more at least than at most.
        """
        given = {**self.model_dump(exclude={"batch"}), "min_hosts": least, "max_hosts": most}
        return validate(Document(given), MembershipConfig)
