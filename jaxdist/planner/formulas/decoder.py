"""The plans of a decoder, the reasons why some are invalid, and the ticks of their pipelines."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from jaxdist.parallel.pipeline.executor.lower import lower
from jaxdist.parallel.pipeline.executor.ticks import Activations, Ticks
from jaxdist.pipeline_schedules.derived import eager
from jaxdist.pipeline_schedules.interleaved import interleaved
from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
from jaxdist.pipeline_schedules.zero_bubble.h1 import zb_h1
from jaxdist.planner.formulas.context import LONG, context_refusal
from jaxdist.planner.formulas.contract import counts_of, invalid
from jaxdist.planner.memory import PlanMemory, plan_memory
from jaxdist.planner.model import Decoder
from jaxdist.planner.plan import KEPT, Plan, Schedule
from jaxdist.planner.target import Places, Target
from jaxdist.planner.time import Seconds, seconds


@dataclass(frozen=True)
class DecoderFormulas:
    """The formulas for plans of a decoder.

    Attributes:
      model: the sizes of the decoder.
    """

    model: Decoder

    @property
    def has_inner(self) -> bool:
        return self.model.window >= LONG

    def plans(self, target: Target, places: Places) -> Iterator[Plan]:
        return plans(self.model, target, places)

    def refusal(self, plan: Plan) -> str | None:
        return plan_refusal(self.model, plan)

    def memory(self, plan: Plan) -> PlanMemory:
        return plan_memory(self.model, plan, ticks_of(plan))

    def seconds(self, plan: Plan, places: Places, target: Target) -> Seconds:
        return seconds(self.model, plan, places, target, ticks_of(plan))


def plans(model: Decoder, target: Target, places: Places) -> Iterator[Plan]:
    """Yield every plan of a decoder on a mesh, including invalid plans."""
    stage, data, tensor = places.sizes
    wide = places.slices is not None
    slices = target.slices if places.slices is None else places.slices
    base = Plan(data, tensor, stage, slices, context=places.inner, wide=wide)
    counts = counts_of(model.batch, base)
    kinds: list[tuple[Schedule | None, int]] = [(None, 1)]
    if stage > 1:
        per_stage = model.layers // stage
        cuts = [n for n in (2, 4) if per_stage % n == 0 and per_stage > n]
        kinds = [("1f1b", 1), ("zb_h1", 1), *(("interleaved", n) for n in cuts)]
    # If devices share sequences, only ZeRO 3 is tried, because these devices split the parameters
    # anyway. In a pipeline these devices do not split the parameters.
    zeros = range(3, 4) if places.inner > 1 and stage == 1 else range(4)
    if wide:
        # ZeRO 1 sends no more than ZeRO 0, and pipelines exclude ZeRO 3, so a single stage of ZeRO
        # is tried.
        zeros = [3 if stage == 1 else int(slices > 1)]
        counts = [count for count in counts if count >= stage]
    for count, remat, zero, (kind, chunks) in itertools.product(counts, KEPT, zeros, kinds):
        scopes = ("all", "ici") if zero and slices > 1 and not wide else ("all",)
        stashes = (False,) if kind is None else (False, True)
        # Only 1F1B becomes shorter when forward tasks run ahead of its schedule.
        aheads = (False, True) if kind == "1f1b" else (False,)
        for scope, narrow, stash, ahead in itertools.product(
            scopes, (False, True), stashes, aheads
        ):
            yield dataclasses.replace(
                base,
                zero=zero,
                scope=scope,
                remat=remat,
                microbatches=count,
                schedule=kind,
                chunks=chunks,
                stash=stash,
                ahead=ahead,
                bfloat16_reduction=narrow,
            )


def plan_refusal(model: Decoder, plan: Plan) -> str | None:
    """Return the reason why a plan of a decoder is invalid, or None for a valid plan."""
    found = _indivisible(model, plan) or context_refusal(model, plan)
    if found is not None:
        return found
    if plan.replicas * plan.context == 1 and (plan.zero or plan.bfloat16_reduction):
        return "with a single replica there is no state to split and there are no gradients to sum"
    if plan.replicas == 1 and plan.zero and not plan.shares_embed:
        return "with a single replica there is no state to split"
    if plan.bfloat16_reduction and (not model.narrow or model.param_bytes == 2):
        return "sums in bfloat16 save no bytes, or the model computes in float32"
    if plan.zero == 3 and plan.stage > 1:
        # `parallel.pipeline.gather` allows ZeRO 3 in pipelines, in two forms. Neither form has a
        # formula yet.
        return "no formula covers the gathers of ZeRO 3 in a pipeline"
    if plan.bfloat16_reduction and plan.zero >= 2:
        return "ZeRO 2 and 3 sum gradients in the compute dtype already"
    return invalid(
        plan.zero, plan.scope, plan.stage > 1, plan.tensor > 1, plan.slices > 1 and not plan.wide,
        plan.bfloat16_reduction,
    )  # fmt: skip


def _indivisible(model: Decoder, plan: Plan) -> str | None:
    if model.batch % (plan.replicas * plan.microbatches):
        return "the batch does not divide over the data axis and microbatches"
    for name, size in (
        ("heads", model.heads),
        ("kv_heads", model.kv_heads),
        ("mlp", model.mlp),
        ("vocabulary", model.vocab),
        ("sequence", model.window),
    ):
        if size % plan.tensor:
            return f"{name} does not divide over axis tensor"
    if model.layers % (plan.stage * plan.chunks):
        return "layers do not divide over stages and chunks"
    if plan.schedule is not None and plan.microbatches < plan.stage:
        return "fewer microbatches than stages"
    if plan.schedule == "interleaved" and plan.microbatches % plan.stage:
        return "microbatches are not a multiple of the stages"
    return None


def ticks_of(plan: Plan) -> Ticks | None:
    """Return the ticks of a plan's pipeline, or None for a plan without a pipeline."""
    if plan.schedule is None:
        return None
    activations = "stash" if plan.stash else "recompute"
    return _ticks(
        plan.schedule, plan.stage, plan.microbatches, plan.chunks, activations, plan.ahead
    )


# The ticks are cached, since they are slow to derive, and plans that differ only in ZeRO or remat
# have the same ticks.
@lru_cache(maxsize=1024)
def _ticks(
    kind: Schedule,
    stages: int,
    microbatches: int,
    chunks: int,
    activations: Activations,
    ahead: bool,
) -> Ticks:
    make = {"1f1b": one_f_one_b, "zb_h1": zb_h1}
    if kind == "interleaved":
        schedule = interleaved(stages, microbatches, chunks)
    else:
        schedule = make[kind](stages, microbatches)
    return lower(eager(schedule) if ahead else schedule, activations=activations)
