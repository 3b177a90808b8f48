"""How often replicas are compared, and what happens where they differ."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from jaxdist.config.schema import Config, Count

_RESTORES = 3


class ReplicaCheckConfig(Config):
    """Finding a device that computes or remembers wrongly, by what replicas of it hold."""

    every: Count
    """Steps between two comparisons; one more stands before each evaluation and checkpoint."""
    on_difference: Literal["stop", "restore"] = "stop"
    """Stop ends the run; restore takes the steps since the newest whole checkpoint again."""
    max_restores: Count = _RESTORES
    """How often a process goes back before it ends the run."""

    @model_validator(mode="after")
    def _check(self) -> ReplicaCheckConfig:
        if self.on_difference == "stop" and self.max_restores != _RESTORES:
            raise ValueError("max_restores has no effect with on_difference: stop")
        return self

    @property
    def restores(self) -> int:
        """How often a process goes back where replicas differ."""
        return self.max_restores if self.on_difference == "restore" else 0
