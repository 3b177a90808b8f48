"""The optimizers that a study compares: customary settings, all but the learning rate fixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxdist.errors import ConfigError, did_you_mean
from jaxdist.types import Json


@dataclass(frozen=True)
class Contender:
    """An optimizer under study.

    Attributes:
      section: its `optim` section, without learning rate and schedule.
      start: where the search for its learning rate at the base batch begins.
    """

    section: Mapping[str, Json]
    start: float


# Each of these moves in proportion to its learning rate; `trainer.adjustable` relies on that.
CONTENDERS: Mapping[str, Contender] = {
    "sgd": Contender({"type": "sgd", "momentum": 0.9, "weight_decay": 1e-4}, 0.05),
    "nesterov": Contender(
        {"type": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}, 0.05
    ),
    "lars": Contender({"type": "lars", "momentum": 0.9, "weight_decay": 1e-4}, 2.0),
    "lamb": Contender({"type": "lamb", "weight_decay": 0.01}, 0.01),
    "adamw": Contender({"type": "adamw", "weight_decay": 0.01}, 0.002),
}


def check_names(names: Sequence[str]) -> None:
    """Names of `CONTENDERS`, each once.

    Raises:
      ConfigError: none, one that does not exist, or one twice.
    """
    if not names:
        raise ConfigError(f"--optimizers is empty; choose from {','.join(CONTENDERS)}")
    for name in names:
        if name not in CONTENDERS:
            raise ConfigError(f"--optimizers {name!r}: {did_you_mean(name, CONTENDERS)}")
        if names.count(name) > 1:
            raise ConfigError(
                f"--optimizers {name!r} is given {names.count(name)} times: give it once"
            )
