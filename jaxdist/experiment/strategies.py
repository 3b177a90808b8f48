"""Check a strategy against the rest of the config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxdist.param_server.training import checks as servers
from jaxdist.train.strategy import lookahead
from jaxdist.train.strategy.config import StrategyConfig
from jaxdist.train.strategy.contract import RunSettings


def check_strategy(strategy: StrategyConfig, given: RunSettings) -> tuple[str, ...]:
    """Return the settings that do nothing, or not what one may expect, a sentence each.

    Raises:
      ConfigError: what does not go together, with the path of the setting in the whole config.
    """
    return CHECKS[strategy.type](strategy, given)


CHECKS: Mapping[str, Callable[[Any, RunSettings], tuple[str, ...]]] = {
    "synchronous": lambda strategy, given: (),
    "lookahead": lookahead.check,
    "parameter_server": servers.check,
}
"""`strategy.type` to what checks it."""
