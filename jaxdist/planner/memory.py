"""The device memory of a plan, by formula.

The size of the training state is exact: the formula splits the state by the rules of ZeRO and of
the mesh. The size of kept activations is exact too, and gradients have the dtypes and shards that
XLA:TPU gives them. The memory of a block, the head and gathered parameters during computation is an
estimate. The factors in `WORK` say how much of this memory is live at once. The factors are fitted
to the buffer assignments of compiled programs (`jaxdist.planner.laid_out`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from jax.sharding import PartitionSpec

from jaxdist.parallel.pipeline.executor.ticks import Ticks
from jaxdist.parallel.zero import padded_dim, split_dim
from jaxdist.planner.model import Decoder, PlannedModel, PlannedParameter
from jaxdist.planner.plan import Plan
from jaxdist.train.offload import GROUPS

WHOLE_BELOW = 2048
"""The default of `parallel.zero.whole_below`. ZeRO does not split tensors with fewer elements."""


@dataclass(frozen=True)
class LiveFactors:
    """The factors for the temporary memory that is live at once.

    State, gradients and kept activations are not temporary. The head and a block are computed at
    different times, so that only the larger of their memories counts.

    Attributes:
      logits: the bytes of each logit.
      ends: the factor on the bytes of embedding and head, in the compute dtype.
      block: the factor on the bytes of all activations of a block.
      layer: the factor on the bytes of the parameters of a block, in the compute dtype.
      sequences: the factor on the bytes of the residual stream of whole sequences, if axis tensor
        splits sequences.
      gathered: the factor on the bytes of the parameters that ZeRO 1 gathers after an update.
      summed: the factor on the bytes of a pipeline's gradients, for the buffers in addition to the
        sum of gradients.
      split: the number that is added to `summed` if ZeRO splits the optimizer state of a pipeline.
      residuals: the factor on the bytes of all activations of a pipeline's blocks, for each
        backward task of which only the first half has run.
      residuals_full: the factor that replaces `residuals` with remat `full`.
    """

    logits: float = 0.0
    ends: float = 0.0
    block: float = 0.0
    layer: float = 0.0
    sequences: float = 0.0
    gathered: float = 0.0
    summed: float = 0.0
    split: float = 0.0
    residuals: float = 0.0
    residuals_full: float = 0.0


STREAMED = 3 / GROUPS
"""The fraction of a state in the host's memory that is on the device at once: the compiled program
copies one group to the device, updates a second group, and copies a third group back."""
WORK: Mapping[str, LiveFactors] = {
    "whole": LiveFactors(logits=2.05, ends=1.95, block=2.36),
    "whole, tensor": LiveFactors(ends=1.69, sequences=11.04, gathered=0.74),
    "scattered": LiveFactors(logits=5.31, ends=3.15),
    "scattered, tensor": LiveFactors(logits=1.49, ends=4.08, sequences=7.46),
    "shards": LiveFactors(logits=5.73, ends=0.28, block=1.42, layer=1.83),
    "shards, tensor": LiveFactors(logits=2.37, block=0.83, layer=0.61, sequences=5.49),
    "pipeline": LiveFactors(logits=4.76, block=2.61, summed=0.26, split=0.49),
    "pipeline, halves": LiveFactors(summed=0.38, split=0.90, residuals=2.58, residuals_full=1.59),
}
"""The factors by kind of plan. "whole" is for ZeRO 0 and 1, "scattered" for ZeRO 2, whose gradients
are split, and "shards" for ZeRO 3, whose parameters are split too. Each of these three kinds has
another entry for plans with axis tensor. Pipelines have an entry for undivided backward tasks, and
an entry for backward tasks that are divided in two (I and W)."""


def work_of(plan: Plan) -> LiveFactors:
    """Return the entry of `WORK` for a plan: the factors of its live memory."""
    if plan.schedule is not None:
        return WORK["pipeline, halves" if plan.schedule == "zb_h1" else "pipeline"]
    kind = ("whole", "whole", "scattered", "shards")[plan.zero]
    return WORK[f"{kind}, tensor" if plan.tensor > 1 else kind]


@dataclass(frozen=True)
class PlanMemory:
    """The bytes that a plan takes on a device.

    Attributes:
      parameters: the bytes of the stored parameters.
      optimizer: the bytes of the optimizer's state.
      gradients: the bytes of all gradients that the device keeps.
      activations: the bytes that are kept for the backward pass, with the buffers of a pipeline.
      working: the temporary bytes of a block or the head, with gathered parameters.
      host: the bytes in the host's memory, which are not part of `total`: the optimizer's state
        and chosen parameters.
      copied: the bytes that a step copies from the host's memory and back.
    """

    parameters: float
    optimizer: float
    gradients: float
    activations: float
    working: float
    host: float = 0.0
    copied: float = 0.0

    @property
    def total(self) -> float:
        """The bytes that the plan takes on a device, which are the sum of all parts."""
        return math.fsum(self.parts().values())

    def offloaded(self) -> PlanMemory:
        """Return the memory with the optimizer's state on the host.

        While the state passes through the device, the activations are no longer needed. Therefore
        the groups of the state count only as far as they exceed the activations and the temporary
        memory together.
        """
        passing = max(0.0, STREAMED * self.optimizer - self.activations - self.working)
        return replace(self, optimizer=passing, host=self.optimizer, copied=2 * self.optimizer)

    def resting(self, parameters: RestingBytes) -> PlanMemory:
        """Return the memory of the plan if the given parameters rest in the host's memory."""
        return replace(
            self,
            parameters=self.parameters - parameters.held + parameters.passing,
            host=self.host + parameters.held,
            copied=self.copied + parameters.copied,
        )

    def parts(self) -> dict[str, float]:
        """Return the bytes of each part of the plan's memory, by its name in the tables."""
        return {
            "parameters": self.parameters,
            "optimizer state": self.optimizer,
            "gradients": self.gradients,
            "activations": self.activations,
            "working set": self.working,
        }


@dataclass(frozen=True)
class RestingBytes:
    """The bytes of the parameters of a device that the host's memory holds between steps.

    Attributes:
      held: the bytes of these parameters.
      passing: the part of `held` that is on the device at once: a layer that is used, and the next
        layer. A parameter outside of the blocks counts whole.
      copied: the bytes that a step copies. The passes copy the parameters of blocks twice in each
        microbatch, and other parameters once. The update copies trained parameters to the device
        and back.
    """

    held: float = 0.0
    passing: float = 0.0
    copied: float = 0.0


def resting_bytes(model: PlannedModel, plan: Plan) -> RestingBytes:
    """Return the bytes of the parameters that the host's memory holds between steps."""
    held = passing = copied = 0.0
    for one in model.tensors:
        if plan.resting and one.resting:
            mine, shard = elements_of(one, splits_of(plan))
            count = one.count(plan.stage)
            size = count * (shard if plan.zero == 3 else mine) * model.param_bytes
            held += size
            passing += size * min(1.0, 2 / count) if one.stacked else size
            copied += size * (plan.microbatches * (1 + one.stacked) + 2 * one.trained)
    return RestingBytes(held, passing, copied)


@dataclass(frozen=True)
class Share:
    """The numbers of parameter elements on a device.

    Attributes:
      whole: the elements that the device computes with, before ZeRO splits them.
      shard: the elements that the device stores if ZeRO splits parameters.
      layer: the part of `whole` in a single block.
      ends: the part of `whole` outside the blocks, in embedding and head.
      ends_shard: the part of `shard` in embedding and head.
      matrices: the part of `whole` in the trained matrices of blocks.
      matrices_shard: the part of `shard` in the trained matrices of blocks.
      trained: the part of `whole` that is trained.
      trained_shard: the part of `shard` that is trained.
      trained_ends: the part of `ends` that is trained.
    """

    whole: int
    shard: int
    layer: int
    ends: int
    ends_shard: int
    matrices: int
    matrices_shard: int
    trained: int
    trained_shard: int
    trained_ends: int


class Splits(NamedTuple):
    """The numbers of devices over which a plan splits parameters.

    Attributes:
      within: the size of the axis that splits parameters within a layer (tensor or expert).
      stage: the number of pipeline stages.
      parts: the number of devices over which ZeRO splits.
      shared: the number of devices over which a sharding rule splits dim embed.
    """

    within: int
    stage: int
    parts: int
    shared: int


def splits_of(plan: Plan) -> Splits:
    """Return the numbers of devices over which a plan splits parameters."""
    shared = plan.context * plan.expert if plan.shares_embed else 1
    return Splits(plan.tensor * plan.expert, plan.stage, plan.state_parts, shared)


def share(model: PlannedModel, plan: Plan) -> Share:
    """Return the numbers of parameter elements on a device with a plan."""
    return _share(model.tensors, splits_of(plan))


# The cache has few entries, since many plans of a search have the same arguments.
@lru_cache(maxsize=65536)
def _share(tensors: tuple[PlannedParameter, ...], splits: Splits) -> Share:
    sizes = [(one, one.count(splits.stage), *elements_of(one, splits)) for one in tensors]

    def both(chosen: Callable[[PlannedParameter], bool]) -> tuple[int, int]:
        found = [(count * mine, count * held) for one, count, mine, held in sizes if chosen(one)]
        return sum(mine for mine, _ in found), sum(held for _, held in found)

    whole, shard = both(lambda one: True)
    ends, ends_shard = both(lambda one: not one.stacked)
    matrices, matrices_shard = both(lambda one: one.trained and one.matrix)
    trained, trained_shard = both(lambda one: one.trained)
    layer = sum(mine for one, _, mine, _ in sizes if one.stacked)
    trained_ends = both(lambda one: one.trained and not one.stacked)[0]
    held = ends, ends_shard, matrices, matrices_shard
    return Share(whole, shard, layer, *held, trained, trained_shard, trained_ends)


def optimizer_bytes(model: PlannedModel, plan: Plan) -> float:
    """Return the bytes of the optimizer's state on a device.

    ZeRO 1 to 3 split the state, and a sharding rule for dim embed splits it too.
    """
    mine = share(model, plan)
    whole, matrices = mine.trained, mine.matrices
    if plan.zero >= 1 or plan.shares_embed:
        whole, matrices = mine.trained_shard, mine.matrices_shard
    return whole * model.state_bytes - matrices * model.spared_bytes


def elements_of(one: PlannedParameter, splits: Splits) -> tuple[int, int]:
    """Return the numbers of a parameter's elements that a device computes with and stores.

    The first is the number of elements that the device computes with. The second is the number of
    elements that the device stores if ZeRO, or a sharding rule for dim embed, splits the parameter.
    For a stacked parameter, both are numbers of a single layer.
    """
    mine = math.prod(one.shape) // (splits.within if one.split is not None else 1)
    shared, parts = 1 if one.embed is None else splits.shared, splits.parts
    held = mine // shared
    if parts == 1 or math.prod(one.shape) * one.count(splits.stage) < WHOLE_BELOW:
        return mine, held
    taken = {one.embed: "context"} if shared > 1 else {}
    if splits.within > 1 and one.split is not None:
        taken[one.split] = "tensor"
    spec = PartitionSpec(*(taken.get(i) for i in range(len(one.shape))))
    dims = tuple(f"dim{i}" for i in range(len(one.shape)))
    dim = split_dim(one.shape, dims, spec, parts)
    if dim is not None:
        return mine, held // parts
    # If no dim divides evenly, ZeRO pads a dim with zeros, so that shards are larger.
    dim = padded_dim(one.shape, dims, spec, parts)
    if dim is None:
        return mine, held
    filled = -(-one.shape[dim] // parts)
    return mine, held // one.shape[dim] * filled


def kept_bytes(model: Decoder, plan: Plan, rows: int) -> float:
    """Return the number of bytes that a block keeps for the backward pass of `rows` sequences."""
    tokens, tensor = rows * model.window / plan.context, plan.tensor
    kept = sum(model.activations[name] for name in plan.kept)
    return tokens * (model.embed + kept) * model.width / tensor


def block_bytes(model: Decoder, plan: Plan, rows: int) -> float:
    """Return the number of bytes of all activations of a block, for `rows` sequences.

    `LiveFactors.block` and other factors are multiplied by this number.
    """
    tokens = rows * model.window / plan.context
    inside = 2 * (model.heads + model.kv_heads) * model.head_dim + 3 * model.mlp + 2 * model.embed
    return tokens * inside * model.width / plan.tensor


def rows_of(model: Decoder, plan: Plan) -> int:
    """Return the number of sequences in a microbatch of a replica."""
    return model.batch // (plan.replicas * plan.microbatches)


def plan_memory(model: Decoder, plan: Plan, ticks: Ticks | None = None) -> PlanMemory:
    """Return the memory of a plan on each device.

    Args:
      model: the model for which the plan is made.
      plan: a valid plan.
      ticks: the ticks of the plan's pipeline, or None without a pipeline.
    """
    mine, work = share(model, plan), work_of(plan)
    stored = mine.shard if plan.zero == 3 else mine.whole
    kept = _kept(model, plan, work, ticks)
    return PlanMemory(
        parameters=float(stored * model.param_bytes),
        optimizer=float(optimizer_bytes(model, plan)),
        gradients=_gradients(model, plan, mine, work),
        activations=kept,
        working=_working(model, plan, mine, work),
    )


def _gradients(model: Decoder, plan: Plan, mine: Share, work: LiveFactors) -> float:
    """Return the number of bytes of all gradients on a device.

    With several microbatches, the device has the gradients of a microbatch and the sum over all
    microbatches.

    Args:
      model: the model for which the plan is made.
      plan: the plan that divides the gradients.
      mine: the numbers of parameter elements on the device.
      work: the factors for the plan.
    """
    summed = mine.trained_shard if plan.zero >= 2 else mine.trained
    if plan.schedule is not None:
        beside = work.summed + work.split * (plan.zero > 0)
        return model.param_bytes * (summed + beside * mine.trained)
    if plan.zero == 3:
        alone = float(mine.trained_shard * min(model.param_bytes, model.width))
    else:
        # The unsplit gradients of all blocks are live together, in the dtype of parameters. The
        # gradients of embedding and head are reduced as soon as they are computed.
        alone = float((mine.trained - mine.trained_ends) * model.param_bytes)
    return alone + summed * model.param_bytes * (plan.microbatches > 1)


def _kept(model: Decoder, plan: Plan, work: LiveFactors, ticks: Ticks | None) -> float:
    """Return the bytes that are kept for the backward pass, with the buffers of a pipeline.

    Args:
      ticks: the ticks of the plan's pipeline, or None without a pipeline.
    """
    rows, layers = rows_of(model, plan), model.layers // (plan.stage * plan.chunks)
    kept = layers * kept_bytes(model, plan, rows)
    if ticks is None:
        return kept
    slots = ticks.slots
    message = rows * model.window * model.embed * model.width / (plan.tensor * plan.context)
    buffers = (slots.inputs + slots.gradients + 2) * message
    if not work.residuals:
        return buffers + kept * max(1, slots.residuals if plan.stash else 0)
    # Between its two parts (I and W), a backward task keeps the recomputed values and their
    # gradients.
    left = work.residuals_full if plan.remat == "full" else work.residuals
    stash = kept * slots.residuals if plan.stash else 0.0
    return buffers + stash + left * slots.kept * layers * block_bytes(model, plan, rows)


def _working(model: Decoder, plan: Plan, mine: Share, work: LiveFactors) -> float:
    """Return the temporary bytes of a step on a device.

    These are the bytes of the head or of a block, whichever is larger, and the bytes of gathered
    sequences, gathered parameters and casts of parameters.

    Args:
      model: the model for which the plan is made.
      plan: the plan that divides the step.
      mine: the numbers of parameter elements on the device.
      work: the factors for the plan.
    """
    rows, width = rows_of(model, plan), model.width
    tokens = rows * model.window / plan.context
    head = work.logits * tokens * model.vocab / plan.tensor / model.loss_chunks
    head += work.ends * mine.ends * width
    block = work.block * block_bytes(model, plan, rows) + work.layer * mine.layer * width
    working = max(head, block)
    if plan.tensor > 1:
        working += work.sequences * tokens * model.embed * width
    if plan.zero == 1 and plan.microbatches == 1:
        working += work.gathered * mine.whole * model.param_bytes
    if model.param_bytes > width:
        cast = mine.whole - mine.ends if plan.schedule is None else mine.whole
        working += width * (mine.shard if plan.zero == 3 else cast)
    return working
