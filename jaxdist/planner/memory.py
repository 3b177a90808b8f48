"""What a plan needs of a device's memory, by formula.

State is exact: it is split by the rules that ZeRO and the mesh follow themselves. Activations that
are kept are exact too, and gradients lie in the dtype and the parts that XLA:TPU gives them. What a
block, the head and gathered parameters take while they are computed is not exact: factors in `WORK`
stand for what is alive at once, fitted to programs as XLA lays them out (`laid_out`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from jax.sharding import PartitionSpec

from jaxdist.parallel.pipeline.executor.ticks import Ticks
from jaxdist.parallel.zero import padded_dim, split_dim
from jaxdist.planner.model import Decoder, Tensor
from jaxdist.planner.plan import Plan

WHOLE_BELOW = 2048
"""As `parallel.zero.whole_below` has it."""


@dataclass(frozen=True)
class Work:
    """How much of each is alive at once, beside state, gradients and kept activations.

    The head or a block, whichever takes more: they are computed one after the other.

    Attributes:
      logits: bytes of each logit.
      ends: of embedding and head, in the compute dtype.
      block: of the activations of one block, all of them.
      layer: of the parameters of one block, in the compute dtype.
      sequences: of the residual stream of whole sequences, where axis tensor splits them.
      gathered: of the parameters that ZeRO 1 gathers after an update, as they are stored.
      summed: of a pipeline's gradients, beside their sum.
      split: the same again where ZeRO splits the optimizer state of a pipeline.
      residuals, residuals_full: of all activations of its blocks, for each backward task that is
        done by half: with remat, and with remat `full`.
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


WORK: Mapping[str, Work] = {
    "whole": Work(logits=2.05, ends=1.95, block=2.36),
    "whole, tensor": Work(ends=1.69, sequences=11.04, gathered=0.74),
    "scattered": Work(logits=5.31, ends=3.15),
    "scattered, tensor": Work(logits=1.49, ends=4.08, sequences=7.46),
    "shards": Work(logits=5.73, ends=0.28, block=1.42, layer=1.83),
    "shards, tensor": Work(logits=2.37, block=0.83, layer=0.61, sequences=5.49),
    "pipeline": Work(logits=4.76, block=2.61, summed=0.26, split=0.49),
    "pipeline, halves": Work(summed=0.38, split=0.90, residuals=2.58, residuals_full=1.59),
}
"""By how parameters and gradients lie: whole (ZeRO 0 and 1), gradients scattered (2), parameters in
shards (3), alone and with axis tensor; in a pipeline, whose backward tasks are whole or halves.
"""


def work_of(plan: Plan) -> Work:
    """The factors of a plan."""
    if plan.schedule is not None:
        return WORK["pipeline, halves" if plan.schedule == "zb_h1" else "pipeline"]
    kind = ("whole", "whole", "scattered", "shards")[plan.zero]
    return WORK[f"{kind}, tensor" if plan.tensor > 1 else kind]


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
      parameters, optimizer: stored from step to step.
      gradients: of all that the device keeps the gradients of.
      activations: kept for the backward pass; of a pipeline, its buffers.
      working: what one block or the head takes besides, with gathered parameters.
    """

    parameters: float
    optimizer: float
    gradients: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """All of it."""
        return math.fsum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """By name, as tables show it."""
        return {
            "parameters": self.parameters,
            "optimizer state": self.optimizer,
            "gradients": self.gradients,
            "activations": self.activations,
            "working set": self.working,
        }


@dataclass(frozen=True)
class Share:
    """Elements of parameters on one device.

    Attributes:
      whole: that it computes with: without ZeRO.
      shard: that ZeRO leaves it.
      layer: of one block, `whole`.
      ends: of embedding and head, `whole`.
      ends_shard: the same that ZeRO leaves it.
    """

    whole: int
    shard: int
    layer: int
    ends: int
    ends_shard: int


def share(model: Decoder, plan: Plan) -> Share:
    """How many elements of the parameters a device has by a plan."""
    return _share(model, plan.tensor, plan.stage, plan.state_parts)


@lru_cache(maxsize=65536)
def _share(model: Decoder, tensor: int, stage: int, parts: int) -> Share:
    whole = shard = layer = ends = ends_shard = 0
    for one in model.tensors:
        mine, split = elements_of(one, tensor, parts, model.layers // stage)
        if one.stacked:
            layers = model.layers // stage
            whole, shard, layer = whole + mine * layers, shard + split * layers, layer + mine
        else:
            ends, ends_shard = ends + mine, ends_shard + split
    return Share(whole + ends, shard + ends_shard, layer, ends, ends_shard)


def elements_of(one: Tensor, tensor: int, parts: int, layers: int) -> tuple[int, int]:
    """Elements of a tensor after axis tensor, and after ZeRO besides.

    Args:
      layers: that hold one, where it is stacked.
    """
    mine = math.prod(one.shape) // (tensor if one.split is not None else 1)
    if parts == 1 or mine * (layers if one.stacked else 1) < WHOLE_BELOW:
        return mine, mine
    taken = tensor > 1 and one.split is not None
    spec = PartitionSpec(
        *("tensor" if taken and i == one.split else None for i in range(len(one.shape)))
    )
    dims = tuple(f"dim{i}" for i in range(len(one.shape)))
    dim = split_dim(one.shape, dims, spec, parts)
    if dim is not None:
        return mine, mine // parts
    dim = padded_dim(one.shape, dims, spec, parts)
    if dim is None:
        return mine, mine
    filled = -(-one.shape[dim] // parts)
    return mine, mine // one.shape[dim] * filled


def kept_bytes(model: Decoder, plan: Plan, rows: int) -> float:
    """Of one block, what so many sequences leave for the backward pass."""
    tokens, tensor = rows * model.window, plan.tensor
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    sizes = {
        "query": query,
        "key": key,
        "value": key,
        "attention": query,
        "attention_out": model.embed,
        "mlp_gate": model.mlp,
        "mlp_up": model.mlp,
    }
    kept = sum(sizes[name] for name in plan.kept)
    return tokens * (model.embed + kept) * model.width / tensor


def block_bytes(model: Decoder, plan: Plan, rows: int) -> float:
    """Every activation of one block: a unit of its working set."""
    tokens = rows * model.window
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    inside = 2 * query + 2 * key + 3 * model.mlp + 2 * model.embed
    return tokens * inside * model.width / plan.tensor


def rows_of(model: Decoder, plan: Plan) -> int:
    """Sequences of one microbatch on one device."""
    return model.batch // (plan.replicas * plan.microbatches)


def memory(model: Decoder, plan: Plan, ticks: Ticks | None = None) -> Memory:
    """What a plan takes on each device.

    Args:
      ticks: of its pipeline.
    """
    mine, work = share(model, plan), work_of(plan)
    stored = mine.shard if plan.zero == 3 else mine.whole
    optimizer = mine.shard if plan.zero >= 1 else mine.whole
    kept = _kept(model, plan, work, ticks)
    return Memory(
        parameters=float(stored * model.param_bytes),
        optimizer=float(optimizer * model.state_bytes),
        gradients=_gradients(model, plan, mine, work),
        activations=kept,
        working=_working(model, plan, mine, work),
    )


def _gradients(model: Decoder, plan: Plan, mine: Share, work: Work) -> float:
    """Of one microbatch, with the sum of several."""
    summed = mine.shard if plan.zero >= 2 else mine.whole
    if plan.schedule is not None:
        beside = work.summed + work.split * (plan.zero > 0)
        return model.param_bytes * (summed + beside * mine.whole)
    if plan.zero == 3:
        alone = float(mine.shard * min(model.param_bytes, model.width))
    else:
        # Whole ones of all blocks, in the dtype of parameters; those of the ends come one by one.
        alone = float((mine.whole - mine.ends) * model.param_bytes)
    return alone + summed * model.param_bytes * (plan.microbatches > 1)


def _kept(model: Decoder, plan: Plan, work: Work, ticks: Ticks | None) -> float:
    """Activations for the backward pass; of a pipeline, its buffers."""
    rows, layers = rows_of(model, plan), model.layers // (plan.stage * plan.chunks)
    kept = layers * kept_bytes(model, plan, rows)
    if ticks is None:
        return kept
    slots = ticks.slots
    message = rows * model.window * model.embed * model.width / plan.tensor
    buffers = (slots.inputs + slots.gradients + 2) * message
    if not work.residuals:
        return buffers + kept * max(1, slots.residuals if plan.stash else 0)
    # Between its halves a backward task leaves what it computed again, and gradients of it.
    left = work.residuals_full if plan.remat == "full" else work.residuals
    stash = kept * slots.residuals if plan.stash else 0.0
    return buffers + stash + left * slots.kept * layers * block_bytes(model, plan, rows)


def _working(model: Decoder, plan: Plan, mine: Share, work: Work) -> float:
    """What the head or a block takes besides, and parameters cast for all blocks at once."""
    rows, width = rows_of(model, plan), model.width
    tokens = rows * model.window
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
