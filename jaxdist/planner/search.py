"""The search over all plans of a model on a target, with memory and time by formula."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxdist.config import Document
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig
from jaxdist.models.gpt import GptConfig
from jaxdist.planner.formulas.contract import Formulas
from jaxdist.planner.formulas.decoder import DecoderFormulas
from jaxdist.planner.formulas.traced import Traced, TracedFormulas, traced_of
from jaxdist.planner.memory import PlanMemory, resting_bytes
from jaxdist.planner.model import Decoder, check_plannable, decoder_of
from jaxdist.planner.plan import Plan
from jaxdist.planner.target import Places, Target, inner_meshes, meshes, wide_meshes
from jaxdist.planner.time import Seconds

Model = Decoder | Traced
"""A model to plan for: the sizes of a decoder, or the traced numbers of any other model."""


def model_of(config: ExperimentConfig, document: Document) -> Model:
    """Return the description of a config's model that the formulas need.

    A gpt without experts is described by the sizes of a decoder, and any other model by the numbers
    of a traced step.

    Raises:
      ConfigError: the planner does not take a setting into account, or the config cannot be built.
    """
    check_plannable(config, document)
    if isinstance(config.model, GptConfig) and config.model.experts is None:
        return decoder_of(config, document)
    return traced_of(config, document)


SPARE = 0.05
"""The fraction of a chip's memory that a plan must leave free, since the formula is not exact."""
MEMORY = "more memory than a chip has"
RESTING = "parallel.zero.offload_parameters needs reductions by XLA, and no stages"
"""The key in `SearchResults.refused` for plans that cannot keep parameters in the host's memory."""


@dataclass(frozen=True)
class Judged:
    """A plan, with the memory and the step time that the formulas predict.

    Attributes:
      plan: the plan to which the numbers belong.
      places: the layout of the plan's mesh on the torus.
      memory: the memory on each device.
      seconds: the time of a step.
      limit_bytes: the memory of each device.
    """

    plan: Plan
    places: Places
    memory: PlanMemory
    seconds: Seconds
    limit_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the plan leaves the fraction `SPARE` of the memory free."""
        return self.memory.total <= (1 - SPARE) * self.limit_bytes

    def mfu(self, model: Model, target: Target, *, masked: bool) -> float:
        """Return the model FLOPs utilization, relative to the peak in bfloat16.

        Args:
          model: the model whose FLOPs count.
          target: the chips.
          masked: whether products that the causal mask discards count as model FLOPs.
        """
        peak = target.device.flops_per_second["bfloat16"] * target.devices
        return model.model_flops(masked=masked) / (peak * self.seconds.total)


@dataclass(frozen=True)
class SearchResults:
    """The results of a search for plans on a target.

    Attributes:
      valid: the valid plans that fit in memory, the fastest plan first.
      too_large: the valid plans that do not fit in memory, the smallest plan first.
      refused: for each reason, the number of plans that are invalid or do not fit in memory.
    """

    valid: tuple[Judged, ...]
    too_large: tuple[Judged, ...]
    refused: Mapping[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of plans that the search examined."""
        return len(self.valid) + sum(self.refused.values())


def search(model: Model, target: Target) -> SearchResults:
    """Search all plans for a model on a target, and predict the memory and time of valid plans.

    The result has the valid plans in order, and the number of refused plans for each reason.
    """
    formulas = formulas_of(model)
    valid: list[Judged] = []
    too_large: list[Judged] = []
    refused: Counter[str] = Counter()
    alone = isinstance(model, Traced)
    further = inner_meshes(target, alone=alone) if formulas.has_inner else ()
    wide = () if alone else wide_meshes(target, context=formulas.has_inner)
    for places in (*meshes(target), *further, *wide):
        for plan in formulas.plans(target, places):
            why = formulas.refusal(plan)
            if why is not None:
                refused[why] += 1
                continue
            if plan.zero_stage > 0:
                if model.resting and (plan.schedule is not None or plan.bfloat16_reduction):
                    refused[RESTING] += 1
                    continue
                plan = dataclasses.replace(plan, offload=model.offload, resting=model.resting)
            judged = judge_plan(model, plan, places, target)
            if judged.fits:
                valid.append(judged)
            else:
                too_large.append(judged)
                refused[MEMORY] += 1
    valid.sort(key=lambda one: (one.seconds.total, one.memory.total))
    too_large.sort(key=lambda one: one.memory.total)
    return SearchResults(tuple(valid), tuple(too_large), dict(refused.most_common()))


def judge_plan(model: Model, plan: Plan, places: Places, target: Target) -> Judged:
    """Return a valid plan with its memory and time.

    Args:
      model: the model for which the plan is made.
      plan: the plan, which must be valid.
      places: the layout of the plan's mesh on the torus.
      target: the chips.

    Raises:
      ConfigError: the plan copies state from the host's memory at an unknown bandwidth.
    """
    formulas = formulas_of(model)
    limit = target.device.memory_bytes
    assert limit is not None, "targets have memory of their own"
    used, spent = formulas.memory(plan), formulas.seconds(plan, places, target)
    if plan.offload or plan.resting:
        used, rate = used.offloaded() if plan.offload else used, target.device.host_bytes_per_second
        used = used.resting(resting_bytes(model, plan))
        if rate is None:
            raise ConfigError(
                f"{target.words}: the bandwidth between the host's memory and a "
                f"{target.device.name} is unknown, so plans with parallel.zero.offload or "
                "offload_parameters have no predicted time: plan for other chips, or set "
                "parallel.zero.offload: false and leave out offload_parameters"
            )
        spent = dataclasses.replace(spent, host=used.copied / rate)
    return Judged(plan, places, used, spent, limit)


def formulas_of(model: Model) -> Formulas:
    """Return the formulas for plans of a model, which are `DecoderFormulas` or `TracedFormulas`."""
    return TracedFormulas(model) if isinstance(model, Traced) else DecoderFormulas(model)


MOST_SLICES = 4096
"""The largest factor by which `least_chips` multiplies a target's slices."""


def least_chips(model: Model, target: Target) -> int | None:
    """Return the number of chips on which the model fits, after slices are added to the target.

    The number of slices is doubled until the model fits in memory. The batch grows too, so that the
    slices divide it. The result is None if the model does not fit even with `MOST_SLICES` times as
    many slices.
    """
    slices = target.slices
    while slices < MOST_SLICES * target.slices:
        slices *= 2
        wider = dataclasses.replace(target, slices=slices)
        # The batch is enlarged to a multiple of the number of devices, since only memory matters.
        grown = dataclasses.replace(model, batch=math.lcm(model.batch, wider.devices))
        if any(_smallest(grown, places, wider) for places in meshes(wider)):
            return wider.chips
    return None


def _smallest(model: Model, places: Places, target: Target) -> bool:
    """Return whether the plan with the least memory on a mesh is valid and fits in memory.

    For a mesh with axis stage the result is False.
    """
    stage, data, tensor = places.sizes
    # A plan takes the least memory with one sequence at a time, ZeRO 3 and `remat: full`. `Plan`
    # has `remat: full` by default.
    plan = Plan(data=data, tensor=tensor, stage=stage, slices=target.slices)
    rows = model.batch // plan.replicas
    plan = dataclasses.replace(plan, microbatches=rows, zero=3 if plan.replicas > 1 else 0)
    if stage > 1 or formulas_of(model).refusal(plan) is not None:
        return False
    return judge_plan(model, plan, places, target).fits


def best(found: SearchResults, top: int) -> tuple[Judged, ...]:
    """Return the `top` fastest plans that fit in memory, without dominated plans.

    A plan is dominated if a faster plan with the same mesh takes no more memory.

    Args:
      found: the results of the search.
      top: the largest number of plans to return.
    """
    chosen: list[Judged] = []
    for one in found.valid:
        if len(chosen) == top:
            break
        same = (other for other in chosen if other.places == one.places)
        if not any(other.memory.total <= one.memory.total for other in same):
            chosen.append(one)
    return tuple(chosen)


def judged_of(found: SearchResults, top: tuple[Judged, ...], number: int) -> Judged:
    """Return the plan with the number `number`, counted from 1.

    Printed plans come first, then all other valid plans that fit in memory, and then valid plans
    that do not fit in memory.

    Raises:
      ConfigError: there is no plan with this number.
    """
    if number <= len(top):
        return top[number - 1]
    printed = {one.plan for one in top}
    every = (*top, *(one for one in found.valid if one.plan not in printed), *found.too_large)
    if number > len(every):
        raise ConfigError(
            f"--explain {number}: {len(found.valid):,} plans fit, and {len(found.too_large):,} "
            f"more plans do not fit: use a number from 1 to {len(every):,}"
        )
    return every[number - 1]


def no_plan(model: Model, target: Target, found: SearchResults) -> ConfigError:
    """Return the error for a search that found no plan that fits in memory.

    The message has the reasons, and the number of chips on which the model would fit.
    """
    reasons = "; ".join(f"{count:,} x {why}" for why, count in found.refused.items())
    head = f"none of {found.count:,} plans of {model.parameters:,} parameters on {target.words}"
    if not found.too_large:
        return ConfigError(f"{head} is valid: {reasons}")
    least = found.too_large[0]
    needs = (
        f"the smallest, {least.plan.words()}, needs {least.memory.total / 1e9:.1f} GB of the "
        f"{least.limit_bytes / 1e9:.1f} GB of a {target.device.name}"
    )
    chips = least_chips(model, target)
    would = f"; no number of slices of {target.text} is enough, but another shape might be"
    if chips is not None:
        would = f"; {chips:,} chips would be enough"
    return ConfigError(f"{head} fits: {reasons}; {needs}{would}")
