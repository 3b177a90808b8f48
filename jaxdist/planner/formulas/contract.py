"""The interface of all formulas for plans, and the functions that they share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Protocol

from jaxdist.collectives.algorithms.xla import Xla
from jaxdist.parallel.zero import ZeroConfig
from jaxdist.planner.memory import PlanMemory
from jaxdist.planner.plan import Plan
from jaxdist.planner.target import Places, Target
from jaxdist.planner.time import Seconds
from jaxdist.validity.features import Facts
from jaxdist.validity.table import violations

MOST_MICROBATCHES = 128
"""The largest number of microbatches in a plan of the search."""


class Formulas(Protocol):
    """The formulas for the memory and time of a model's plans; the formulas need no compilation."""

    @property
    def has_inner(self) -> bool:
        """Whether plans may have axis context or axis expert instead of axis tensor."""
        ...

    def plans(self, target: Target, places: Places) -> Iterator[Plan]:
        """Yield every plan on a mesh, including invalid plans."""
        ...

    def refusal(self, plan: Plan) -> str | None:
        """Return the reason why a plan is invalid, or None for a valid plan.

        The reason does not mention the plan's numbers, so that many plans share a reason.
        """
        ...

    def memory(self, plan: Plan) -> PlanMemory:
        """Return the memory of a valid plan on each device."""
        ...

    def seconds(self, plan: Plan, places: Places, target: Target) -> Seconds:
        """Return the time of a valid plan's step."""
        ...


def counts_of(batch: int, plan: Plan) -> list[int]:
    """Return all possible numbers of equal microbatches, at most `MOST_MICROBATCHES`.

    Args:
      batch: the number of examples in a step.
      plan: the plan, whose replicas share the batch.
    """
    rows = max(1, batch // plan.replicas)
    return [n for n in range(1, min(rows, MOST_MICROBATCHES) + 1) if rows % n == 0]


@lru_cache(maxsize=1024)
def invalid(
    zero: int, scope: str, staged: bool, split: bool, two: bool, narrow: bool
) -> str | None:
    """Return the first reason, as a sentence, for which a kind of plan is refused.

    The reasons are from the validity table. ZeRO 3 in a pipeline is refused too. The result is None
    for a valid plan.

    Args:
      zero: the ZeRO stage.
      scope: the scope of ZeRO.
      staged: whether the plan has a pipeline.
      split: whether the plan has axis tensor.
      two: whether the plan's data axis spans two networks.
      narrow: whether the plan reduces gradients in bfloat16.
    """
    # Every axis that is larger than 1 has size 2 here, so that the cache has few entries.
    mesh = {"stage": 2} if staged else {}
    mesh |= {"data_dcn": 2, "data_ici": 2} if two else {"data": 2}
    mesh |= {"tensor": 2} if split else {}
    facts = Facts(
        mesh,
        ("data_dcn", "data_ici") if two else ("data",),
        reduce=Xla() if narrow else None,
        zero=ZeroConfig.model_validate({"stage": zero, "scope": scope}),
        reduce_dtype="bfloat16" if narrow else None,
    )
    if staged and zero == 3:
        return "ZeRO 3 in a pipeline gathers a stage's parameters in every task"
    found = violations(facts)
    return found[0] if found else None
