"""The consistency models with rounds, which apply all changes of a round as one update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from jaxdist.errors import ConfigError
from jaxdist.param_server.consistency.contract import (
    Arrival,
    Clocks,
    Consistency,
    Merge,
    WeightedChange,
)


class Rounds(Consistency):
    """The base class of consistency models in which the version is the number of the round."""

    def floor_of(self, clocks: Clocks) -> int:
        return clocks.version

    def clock_of(self, clocks: Clocks, client: int) -> int:
        # A worker whose change arrived too late continues with the round that is open.
        return max(clocks.clocks[client], clocks.version)

    def fresh(self, floor: int, clock: int) -> bool:
        return floor >= clock


class BSP(Rounds):
    """Bulk-synchronous parallel: the mean of a round's gradients, weighted by tokens, is one step.

    Gradients are added in the order of the workers' numbers, not in their order of arrival, so the
    result is bit-identical to synchronous SGD. With backups, the first gradients of a round count,
    and the later gradients are dropped (Chen et al., "Revisiting distributed synchronous SGD",
    arXiv 1604.00981).
    """

    type: Literal["bsp"] = "bsp"
    """The name that selects this consistency model in a config."""
    backups: Annotated[int, Field(ge=0)] = 0
    """The number of workers whose gradients a round does not wait for, so that slow workers delay
    no round. 0 waits for all workers."""

    def check(self, *, workers: int, learning_rate: float) -> None:
        if self.backups >= workers:
            raise ConfigError(
                f"strategy.consistency.backups {self.backups} of {workers} workers: a round waits "
                f"for at least 1 worker, so at most {workers - 1} workers can be backups",
                setting=("backups",),
            )

    def refusal(self, clocks: Clocks, arrival: Arrival) -> str | None:
        # Even a change that adds nothing is kept, because the round waits for each worker's change.
        late = arrival.clock < clocks.version
        return f"round {arrival.clock} is over" if late else None

    def due(self, clocks: Clocks, now: float) -> Merge | None:
        # A worker that has left counts as a backup. If as many workers have left as there are
        # backups, a round therefore waits for all remaining workers.
        spare = max(0, len(clocks.clocks) - (clocks.team - self.backups))
        due = clocks.held and clocks.missing <= spare
        return mean_of(clocks.held, clocks.version) if due else None


def mean_of(held: Sequence[Arrival], version: int) -> Merge:
    """Return a merge by the mean of all usable changes, weighted by tokens, ordered by client.

    Weights are divided by the largest weight, so that equal weights become 1 and cause no rounding.
    A change with 0 tokens is left out, not multiplied by 0. If no change counts, the merge has no
    parts, and the optimizer takes no step.

    Args:
      held: the changes of the round.
      version: the current version of the range, from which the staleness of each change is
        computed.
    """
    ordered = sorted(held, key=lambda one: (one.client, one.sequence))
    counted = [one for one in ordered if one.nothing is None]
    most = max((one.tokens for one in counted), default=1.0)
    parts = tuple(WeightedChange(one, one.tokens / most, version - one.version) for one in counted)
    total = sum((part.weight for part in parts), start=0.0) if parts else 1.0
    without = tuple(one for one in ordered if one.nothing is not None)
    return Merge(parts, total=total, without=without)
