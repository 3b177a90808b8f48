"""What a plan needs of a device's memory, by formula.

State is exact: it is split by the rules that ZeRO and the mesh follow themselves. Activations that
are kept are exact too. What a block, the head and gathered parameters take while they are computed
is not: factors in `WORK` stand for what XLA:TPU has alive at once, read from compiled programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from jax.sharding import PartitionSpec

from jaxdist.parallel.pipeline.executor.ticks import Ticks
from jaxdist.parallel.zero import padded_dim, split_dim
from jaxdist.planner.model import Decoder, Tensor
from jaxdist.planner.plan import KEPT, Plan

WHOLE_BELOW = 2048
"""As `parallel.zero.whole_below` has it."""


@dataclass(frozen=True)
class Work:
    """How much of each is alive at once, beside state and kept activations.

    Attributes:
      block: of the activations of one block, all of them.
      logits: bytes of each logit.
      ends: of embedding and head, gathered in the compute dtype.
      sequences: whole sequences of the residual stream, where axis tensor splits them elsewhere.
      accumulated: of several microbatches, the sum of gradients with what is added to it.
      summed_in_place: the same in a pipeline whose replicas are one: there is nothing to reduce.
    """

    block: float = 3.0
    logits: float = 3.5
    ends: float = 2.1
    sequences: float = 3.8
    accumulated: float = 1.9
    summed_in_place: float = 1.2


WORK = Work()


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
        mine, split = _of(one, tensor, parts, model.layers // stage)
        if one.stacked:
            layers = model.layers // stage
            whole, shard, layer = whole + mine * layers, shard + split * layers, layer + mine
        else:
            ends, ends_shard = ends + mine, ends_shard + split
    return Share(whole + ends, shard + ends_shard, layer, ends, ends_shard)


def _of(one: Tensor, tensor: int, parts: int, layers: int) -> tuple[int, int]:
    """Elements of a tensor after axis tensor, and after ZeRO besides."""
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
    kept = sum(sizes[name] for name in KEPT[plan.remat])
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


def memory(model: Decoder, plan: Plan, ticks: Ticks | None = None, work: Work = WORK) -> Memory:
    """What a plan takes on each device.

    Args:
      ticks: of its pipeline.
    """
    mine, rows = share(model, plan), rows_of(model, plan)
    stored = mine.shard if plan.zero == 3 else mine.whole
    optimizer = mine.shard if plan.zero >= 1 else mine.whole
    summed = mine.shard if plan.zero >= 2 else mine.whole
    # One microbatch's gradients stay in the compute dtype until the update reads them.
    gradients = float(summed * min(model.param_bytes, model.width))
    if plan.microbatches > 1:
        alone = ticks is not None and plan.replicas == 1
        factor = work.summed_in_place if alone else work.accumulated
        gradients = factor * summed * model.param_bytes
    layers = model.layers // (plan.stage * plan.chunks)
    kept = layers * kept_bytes(model, plan, rows)
    message = rows * model.window * model.embed * model.width / plan.tensor
    if ticks is not None:
        # Between its halves a backward task leaves what it read, and a gradient of each of it.
        kept *= max(1, (ticks.slots.residuals if plan.stash else 0) + 2 * ticks.slots.kept)
        kept += (ticks.slots.inputs + ticks.slots.gradients + 2) * message
        gradients += mine.whole * model.width * (model.param_bytes > model.width)
    logits = rows * model.window * model.vocab / plan.tensor / model.loss_chunks
    block = work.block * block_bytes(model, plan, rows)
    if plan.tensor > 1:
        block += work.sequences * message * plan.tensor
    working = max(block, work.logits * logits + work.ends * mine.ends * model.width)
    return Memory(
        parameters=float(stored * model.param_bytes),
        optimizer=float(optimizer * model.state_bytes),
        gradients=gradients,
        activations=kept,
        working=working,
    )
