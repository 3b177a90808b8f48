"""Every plan of a model on a target, judged by formula: which fit, which are fastest."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from jaxdist.collectives.algorithms.xla import Xla
from jaxdist.errors import ConfigError
from jaxdist.parallel.pipeline.executor.lower import lower
from jaxdist.parallel.pipeline.executor.ticks import Activations, Ticks
from jaxdist.parallel.pipeline.schedules.derived import eager
from jaxdist.parallel.pipeline.schedules.interleaved import interleaved
from jaxdist.parallel.pipeline.schedules.one_f_one_b import one_f_one_b
from jaxdist.parallel.pipeline.schedules.zero_bubble import zb_h1
from jaxdist.parallel.validity.table import Facts, violations
from jaxdist.parallel.zero import ZeroConfig
from jaxdist.planner.memory import Memory, memory
from jaxdist.planner.model import Decoder
from jaxdist.planner.plan import KEPT, Plan, Schedule
from jaxdist.planner.target import Places, Target, meshes
from jaxdist.planner.time import Seconds, seconds

MOST_MICROBATCHES = 128
SPARE = 0.05
"""Of a chip's memory that a plan must leave by formula, since the formula is not exact."""
MEMORY = "more memory than a chip has"


@dataclass(frozen=True)
class Judged:
    """A plan with what it takes.

    Attributes:
      limit_bytes: of a chip's memory, what a program may take.
    """

    plan: Plan
    places: Places
    memory: Memory
    seconds: Seconds
    limit_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the formula leaves `SPARE` of the memory."""
        return self.memory.total <= (1 - SPARE) * self.limit_bytes

    def mfu(self, model: Decoder, target: Target, *, masked: bool) -> float:
        """Model FLOPs utilization, of the peak in bfloat16 as `jaxdist inspect` has it."""
        peak = target.device.flops_per_second["bfloat16"] * target.devices
        return model.model_flops(masked=masked) / (peak * self.seconds.total)


@dataclass(frozen=True)
class Found:
    """All plans.

    Attributes:
      valid: the plans that fit, the fastest first.
      too_large: those that are valid and do not fit, the smallest first.
      refused: plans refused, by reason.
    """

    valid: tuple[Judged, ...]
    too_large: tuple[Judged, ...]
    refused: Mapping[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Of all plans looked at."""
        return len(self.valid) + sum(self.refused.values())


def search(model: Decoder, target: Target) -> Found:
    """Judge every plan.

    Of meshes, microbatches or schedules that do not divide the model, one refusal is counted for
    each plan that they rule out.
    """
    valid: list[Judged] = []
    too_large: list[Judged] = []
    refused: Counter[str] = Counter()
    for places in meshes(target):
        for plan in plans(model, target, places):
            why = refusal(model, plan)
            if why is not None:
                refused[why] += 1
                continue
            judged = judge(model, plan, places, target)
            if judged.fits:
                valid.append(judged)
            else:
                too_large.append(judged)
                refused[MEMORY] += 1
    valid.sort(key=lambda one: (one.seconds.total, one.memory.total))
    too_large.sort(key=lambda one: one.memory.total)
    return Found(tuple(valid), tuple(too_large), dict(refused.most_common()))


def judge(model: Decoder, plan: Plan, places: Places, target: Target) -> Judged:
    """The memory and time of one valid plan."""
    ticks = ticks_of(plan)
    limit = target.device.memory_bytes
    assert limit is not None, "targets have memory of their own"
    return Judged(
        plan,
        places,
        memory(model, plan, ticks),
        seconds(model, plan, places, target, ticks),
        limit,
    )


def plans(model: Decoder, target: Target, places: Places) -> Iterator[Plan]:
    """Every plan on one mesh, valid or not."""
    stage, data, tensor = places.sizes
    base = Plan(data=data, tensor=tensor, stage=stage, slices=target.slices)
    batch = max(1, model.batch // base.replicas)
    counts = [n for n in range(1, min(batch, MOST_MICROBATCHES) + 1) if batch % n == 0]
    kinds: list[tuple[Schedule | None, int]] = [(None, 1)]
    if stage > 1:
        per_stage = model.layers // stage
        cuts = [n for n in (2, 4) if per_stage % n == 0 and per_stage > n]
        kinds = [("1f1b", 1), ("zb_h1", 1), *(("interleaved", n) for n in cuts)]
    for count, remat, zero, (kind, chunks) in itertools.product(counts, KEPT, range(4), kinds):
        scopes = ("all", "ici") if zero and target.slices > 1 else ("all",)
        stashes = (False,) if kind is None else (False, True)
        # Forward passes ahead shorten the ticks of 1F1B; the others are laid out for theirs.
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


def refusal(model: Decoder, plan: Plan) -> str | None:
    """Why a plan is none, in words that many plans share; None where it is one."""
    found = _indivisible(model, plan)
    if found is not None:
        return found
    if plan.replicas == 1 and (plan.zero or plan.bfloat16_reduction):
        return "one replica has no state to split and no gradients to sum"
    if plan.bfloat16_reduction and (not model.narrow or model.param_bytes == 2):
        return "sums in bfloat16 save nothing, or the model is float32"
    if plan.bfloat16_reduction and plan.zero >= 2:
        return "ZeRO 2 and 3 sum gradients in the compute dtype as it is"
    return _invalid(
        plan.zero, plan.scope, plan.stage > 1, plan.tensor > 1, plan.slices > 1,
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
        return "microbatches are no multiple of the stages"
    return None


@lru_cache(maxsize=1024)
def _invalid(
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


def ticks_of(plan: Plan) -> Ticks | None:
    """The ticks of a plan's pipeline; None without one."""
    if plan.schedule is None:
        return None
    activations = "stash" if plan.stash else "recompute"
    return _ticks(
        plan.schedule, plan.stage, plan.microbatches, plan.chunks, activations, plan.ahead
    )


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


MOST_SLICES = 4096


def least_chips(model: Decoder, target: Target) -> int | None:
    """Chips of as many slices as the model would fit on, with a sequence or more for each replica.

    None where it fits on none, however many.
    """
    slices = target.slices
    while slices < MOST_SLICES * target.slices:
        slices *= 2
        wider = dataclasses.replace(target, slices=slices)
        # More slices need as many sequences: a batch that only divides over fewer is grown.
        grown = dataclasses.replace(model, batch=math.lcm(model.batch, wider.devices))
        if any(_smallest(grown, places, wider) for places in meshes(wider)):
            return wider.chips
    return None


def _smallest(model: Decoder, places: Places, target: Target) -> bool:
    """Whether the plan of a mesh that takes least memory fits."""
    stage, data, tensor = places.sizes
    plan = Plan(data=data, tensor=tensor, stage=stage, slices=target.slices)
    rows = model.batch // plan.replicas
    plan = dataclasses.replace(plan, microbatches=rows, zero=3 if plan.replicas > 1 else 0)
    if stage > 1 or refusal(model, plan) is not None:
        return False
    return judge(model, plan, places, target).fits


def best(found: Found, top: int) -> tuple[Judged, ...]:
    """The fastest plans, without those that a faster one of their mesh beats in memory too."""
    chosen: list[Judged] = []
    for one in found.valid:
        if len(chosen) == top:
            break
        if not any(_beaten(one, other) for other in chosen):
            chosen.append(one)
    return tuple(chosen)


def _beaten(one: Judged, by: Judged) -> bool:
    return one.places == by.places and one.memory.total >= by.memory.total


def judged_of(found: Found, top: tuple[Judged, ...], number: int) -> Judged:
    """The plan of a number, counted from 1: those printed, then the others, then what is too large.

    Raises:
      ConfigError: there are not so many.
    """
    if number <= len(top):
        return top[number - 1]
    printed = {one.plan for one in top}
    every = (*top, *(one for one in found.valid if one.plan not in printed), *found.too_large)
    if number > len(every):
        raise ConfigError(
            f"--explain {number}: there are {len(found.valid):,} plans that fit, and "
            f"{len(found.too_large):,} after them that do not: give 1 to {len(every):,}"
        )
    return every[number - 1]


def no_plan(model: Decoder, target: Target, found: Found) -> ConfigError:
    """What to tell where nothing is left: the reasons with their counts, and what would do."""
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
    would = f"; {chips:,} chips would do" if chips else "; no number of chips would do"
    return ConfigError(f"{head} fits: {reasons}; {needs}{would}")
