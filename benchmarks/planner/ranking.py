"""The best plans of a model by formula, and their order by compiled programs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.planner.cases import llama_7b, llama_70b
from benchmarks.planner.compiled import kept_or_compiled, kept_or_laid_out
from jaxdist.planner.confirm import Confirmed
from jaxdist.planner.model import Decoder
from jaxdist.planner.search import Judged, best, search
from jaxdist.planner.target import parse_target

SIX = 6


@dataclass(frozen=True)
class Case:
    """A model on a topology.

    Attributes:
      name: the name of the case.
      model: the model, with its batch.
      topology: the TPUs.
      settings: the overrides of `benchmarks/tpu/llama.yaml` that give this model.
    """

    name: str
    model: Decoder
    topology: str
    settings: tuple[str, ...]


SIZES_7B = (
    "model.layers=32",
    "model.embed=4096",
    "model.heads=32",
    "model.kv_heads=32",
    "model.mlp=11008",
)
RANKED = Case("Llama-2-7B on v5e:4x4", llama_7b(64), "v5e:4x4", (*SIZES_7B, "train.batch_size=64"))


@dataclass(frozen=True)
class Ranked:
    """A plan among the best, with the results of the formulas and of the compiler."""

    judged: Judged
    compiled: Confirmed


def ranked(case: Case) -> Sequence[Ranked]:
    """Compile the best plans of a case, in their order by formula, fastest first."""
    found = search(case.model, parse_target(case.topology))
    return [
        Ranked(one, kept_or_compiled(list(case.settings), one.plan, case.topology))
        for one in best(found, SIX)
    ]


TOP_FIVE = (
    RANKED,
    Case("7B, v5e:16x16", llama_7b(1024), "v5e:16x16", (*SIZES_7B, "train.batch_size=1024")),
    Case("70B, v5p:8x8x8", llama_70b(1024), "v5p:8x8x8", ("train.batch_size=1024",)),
)


def laid_out(cases: Sequence[Case], count: int) -> Sequence[Ranked]:
    """Return the best plans of each case, with the memory that the compiler lays out."""
    return [
        Ranked(one, kept_or_laid_out(list(case.settings), one.plan, case.topology))
        for case in cases
        for one in best(search(case.model, parse_target(case.topology)), count)
    ]


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Kendall's tau: concordant minus discordant pairs, over all pairs (Kendall 1938).

    >>> kendall_tau([1, 2, 3], [1, 3, 2])
    0.3333333333333333
    """
    score = pairs = 0
    for i, j in itertools.combinations(range(len(first)), 2):
        agreement = (first[i] - first[j]) * (second[i] - second[j])
        score += (agreement > 0) - (agreement < 0)
        pairs += 1
    return score / pairs if pairs else math.nan
