"""The settings for comparing replicas, and notices about differences that no comparison finds."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from jaxdist.config.schema import Config, Count
from jaxdist.train.digest import Replicas
from jaxdist.train.step import Program

_RESTORES = 3


class ReplicaCheckConfig(Config):
    """The detection of faulty devices by a comparison of replicas of the state."""

    every: Count
    """The number of steps between two comparisons. Replicas are also compared before each
    evaluation and checkpoint."""
    on_difference: Literal["stop", "restore"] = "stop"
    """The reaction to a difference: stop ends the run, and restore repeats the steps since the
    newest complete checkpoint."""
    max_restores: Count = _RESTORES
    """The number of times that one process may restore the run. The next difference after that ends
    the run."""

    @model_validator(mode="after")
    def _check(self) -> ReplicaCheckConfig:
        if self.on_difference == "stop" and self.max_restores != _RESTORES:
            raise ValueError(
                "max_restores has no effect with on_difference: stop; leave max_restores out, or "
                "set on_difference: restore"
            )
        return self

    @property
    def restores(self) -> int:
        """The number of times that a process may restore a checkpoint after replicas differ."""
        return self.max_restores if self.on_difference == "restore" else 0


def replicas_of(program: Program) -> Replicas:
    """Return the replicas of a program's training state."""
    return Replicas(program.layout.mesh, program.state_shapes)


def explained(settings: ReplicaCheckConfig | None, program: Program) -> tuple[str, ...]:
    """Return a line on how much of the state is compared, or () if nothing is compared.

    Args:
      settings: the settings of the comparison, or None if replicas are not compared.
    """
    if settings is None:
        return ()
    coverage = replicas_of(program).coverage
    return (
        f"replicas are compared every {settings.every} steps: {coverage.share:.1%} of the "
        f"{coverage.held_bytes / 1e6:,.1f} MB of state on a device",
    )


def replica_notices(settings: ReplicaCheckConfig | None, program: Program) -> tuple[str, ...]:
    """Return a sentence for each kind of difference that comparisons cannot find in this plan.

    Args:
      settings: the settings of the comparison, or None if replicas are not compared.
    """
    if settings is None:
        return ()
    if not replicas_of(program).coverage.compared_bytes:
        return (
            "train.check_replicas has no effect: no part of the state has copies on two devices; "
            "leave train.check_replicas out",
        )
    zero = program.exchange.zero
    if 0 < zero.stage < 3 and settings.every > 1:
        return (
            f"train.check_replicas.every {settings.every} misses differences with "
            f"parallel.zero.stage {zero.stage}: each step gathers the parameters from shards "
            "again, which makes replicas equal even if a shard is wrong. Set every: 1, which "
            "compares the replicas before each gather",
        )
    return ()
