"""The checks of a strategy against the rest of the config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxdist.param_server.training import checks as servers
from jaxdist.train.strategy import lookahead
from jaxdist.train.strategy.config import StrategyConfig
from jaxdist.train.strategy.contract import RunSettings


def check_strategy(strategy: StrategyConfig, given: RunSettings) -> tuple[str, ...]:
    """Return a sentence on each setting that has no effect, or that has an unexpected effect.

    Raises:
      ConfigError: settings do not fit together; the error has their paths in the complete config.
    """
    return CHECKS[strategy.type](strategy, given)


CHECKS: Mapping[str, Callable[[Any, RunSettings], tuple[str, ...]]] = {
    "synchronous": lambda strategy, given: (),
    "lookahead": lookahead.length_notices,
    "hybrid": lambda strategy, given: (),
    "parameter_server": servers.ineffective_settings,
}
"""The function that checks the settings of a strategy, by `strategy.type`."""
