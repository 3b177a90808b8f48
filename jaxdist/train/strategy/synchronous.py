"""All processes take every step together."""

from __future__ import annotations

from typing import Literal

from jaxdist.config.schema import Config
from jaxdist.optim.build import Optimizer
from jaxdist.train.state import Outer
from jaxdist.train.strategy.contract import RunSettings


class Synchronous(Config):
    """All processes take every step together, and only steps change parameters."""

    type: Literal["synchronous"] = "synchronous"
    """Selects this strategy."""

    def outer(self, optimizer: Optimizer) -> Outer | None:
        return None

    def check(self, given: RunSettings) -> tuple[str, ...]:
        return ()
