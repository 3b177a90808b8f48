"""A placement that puts everything on one server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jaxdist.errors import ConfigError
from jaxdist.param_server.placement.contract import PlacementRule
from jaxdist.param_server.placement.ranges import Range


class Central(PlacementRule):
    """A rule that puts everything on one server, which receives the pushes of all workers.

    In a round, N workers send N times the parameters' bytes to this server.
    """

    type: Literal["central"] = "central"
    """The name that selects this placement in a config."""

    def owners(self, ranges: Sequence[Range], servers: tuple[int, ...]) -> tuple[int, ...]:
        if len(servers) > 1:
            raise ConfigError(
                f"placement type central uses a single server, but there are {len(servers)} "
                "servers: set one server, or type balanced or hashed"
            )
        return servers * len(ranges)

    def law(self, servers: int) -> str:
        return "a single server holds all parameters"
