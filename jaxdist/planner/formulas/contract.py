"""What the search asks of a model, and what all models' answers share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Protocol

from jaxdist.collectives.algorithms.xla import Xla
from jaxdist.parallel.zero import ZeroConfig
from jaxdist.planner.memory import Memory
from jaxdist.planner.plan import Plan
from jaxdist.planner.target import Places, Target
from jaxdist.planner.time import Seconds
from jaxdist.validity.features import Facts
from jaxdist.validity.table import violations

MOST_MICROBATCHES = 128


class Formulas(Protocol):
    """What is known of a model's plans without compiling one."""

    def plans(self, target: Target, places: Places) -> Iterator[Plan]:
        """Every plan on one mesh, valid or not."""
        ...

    def refusal(self, plan: Plan) -> str | None:
        """Why a plan is none, in words that many plans share; None where it is one."""
        ...

    def memory(self, plan: Plan) -> Memory:
        """What a valid plan takes on each device."""
        ...

    def seconds(self, plan: Plan, places: Places, target: Target) -> Seconds:
        """The time of its step."""
        ...


def counts_of(batch: int, plan: Plan) -> list[int]:
    """The microbatches that a plan's replicas can cut their part of a batch into."""
    rows = max(1, batch // plan.replicas)
    return [n for n in range(1, min(rows, MOST_MICROBATCHES) + 1) if rows % n == 0]


@lru_cache(maxsize=1024)
def invalid(
    zero: int, scope: str, staged: bool, split: bool, two: bool, narrow: bool
) -> str | None:
    """What the table of validity says of such a plan, its first row."""
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
