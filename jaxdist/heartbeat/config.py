"""The section `elastic` of a configuration: settings on which all hosts of a run must agree."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from jaxdist.config.document import Document
from jaxdist.config.schema import LARGEST, Config, Count, validate


class LeaseConfig(Config):
    """The times for which hosts hold leases, and for which the registry waits for hosts."""

    lease_seconds: PositiveFloat = 10.0
    """The time, in seconds, without a heartbeat after which a host counts as lost; a host should
    renew its lease several times within this time."""
    settle_seconds: NonNegativeFloat = 5.0
    """The time, in seconds, for which no host may have joined or left before a generation starts,
    or before it saves and stops in order to grow."""
    drift: Annotated[float, Field(ge=0, lt=0.5)] = 0.01
    """The largest relative error in the rate of any host's clock, fast or slow."""
    stuck_host_seconds: NonNegativeFloat = 300.0
    """The time, in seconds, for which a host with a stuck process is left out, if the other hosts
    can train without this host; 0 lets the host rejoin at once."""


class MembershipConfig(LeaseConfig):
    """The number of hosts of a generation, and the times for which the registry waits for them."""

    min_hosts: Count = 1
    """The smallest number of hosts with which a generation starts."""
    max_hosts: Count = LARGEST
    """The largest number of hosts in a generation; additional hosts wait, to replace lost hosts."""

    @model_validator(mode="after")
    def _check(self) -> MembershipConfig:
        if self.min_hosts > self.max_hosts:
            raise ValueError(
                f"min_hosts {self.min_hosts} is above max_hosts {self.max_hosts}: lower min_hosts"
            )
        return self

    @property
    def held_seconds(self) -> float:
        """The seconds, by the host's clock, for which a host assumes that it holds its lease."""
        # The host's clock may be slow by `drift` while the registry's clock is fast by `drift`.
        return self.lease_seconds * (1 - self.drift) / (1 + self.drift)


class ElasticConfig(LeaseConfig):
    """The settings of elastic runs (`jaxdist agent`), whose hosts may join and leave."""

    batch: Literal["same", "rescale"] = "same"
    """The reaction to a smaller mesh: `same` keeps the batch size and takes more microbatches;
    `rescale` shrinks the batch with the mesh and sets the learning rate by the rule of
    optim.scale_from.
    """

    def membership(self, least: int, most: int) -> MembershipConfig:
        """Return the settings of the registry for generations of `least` to `most` hosts.

        Args:
          least, most: the smallest and the largest number of hosts in a generation.

        Raises:
          ConfigError: `least` is larger than `most`.
        """
        given = {**self.model_dump(exclude={"batch"}), "min_hosts": least, "max_hosts": most}
        return validate(Document(given), MembershipConfig)
